"""Between pixels and latents: the Wan 2.2 autoencoder of the checkpoint, which diffusers computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor
from torch.nn.functional import interpolate

from vllm_omni.api import IMAGE, Payload, StageContext

from .sizes import Shape, dtype_of


class Autoencoder:
    """One half of it: that which `encodes`, or the other. Latents are normalised by the checkpoint's mean and deviation."""

    def __init__(self, ctx: StageContext, *, encodes: bool) -> None:
        kind, device, folder = getattr(torch, dtype_of(ctx)), ctx.device, Path(ctx.model, "vae")
        if ctx.args["load_format"] == "dummy":
            model = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(folder)).to(kind)
        else:  # The other way to load replaces parts of torch meanwhile, for all threads.
            model = AutoencoderKLWan.from_pretrained(folder, dtype=kind, low_cpu_mem_usage=False)
        self._convolutions = sum(isinstance(each, WanCausalConv3d) for each in model.decoder.modules())
        if encodes:
            model.decoder = None
        else:
            model.encoder = None
        self.model = model.to(device).eval().requires_grad_(False)
        for each in self.model.modules():
            if isinstance(each, WanCausalConv3d):
                each.to(memory_format=torch.channels_last_3d)  # as the kernels for them want it
        config = self.model.config
        self.spatial, self.temporal, self.channels = config.scale_factor_spatial, config.scale_factor_temporal, config.z_dim
        self.mean, self.deviation = (
            torch.tensor(each, dtype=kind, device=device).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std)
        )

    def grid(self, shape: Shape) -> tuple[int, int, int, int]:
        """The shape of latents: channels, frames, height, width."""
        return (self.channels, (shape.frames - 1) // self.temporal + 1, shape.height // self.spatial, shape.width // self.spatial)

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """Latents, float32, of frames [3, frames, height, width] in -1..1."""
        pixels = frames.unsqueeze(0).to(self.mean)
        found = self.model.encode(pixels).latent_dist.mode()
        return ((found - self.mean) / self.deviation)[0].float().cpu()

    def decode(self, latents: Tensor) -> Iterator[Tensor]:
        """Frames uint8 [frames, height, width, 3] of latents [channels, frames, height, width], some at a time."""
        patch, kept = self.model.config.patch_size or 1, [None] * self._convolutions
        inner = self.model.post_quant_conv(latents.unsqueeze(0).to(self.mean) * self.deviation + self.mean)
        for number in range(inner.shape[2]):
            made = self.model.decoder(inner[:, :, number : number + 1], feat_cache=kept, feat_idx=[0], first_chunk=number == 0)
            pixels = made[0].unflatten(0, (-1, patch, patch)).permute(3, 4, 2, 5, 1, 0).flatten(3, 4).flatten(1, 2)
            yield ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def frames_of(given: Payload, shape: Shape, count: int, *, last: bool) -> Tensor:
    """At most `count` frames [3, frames, height, width] in -1..1: of a picture, cut to its middle, or of a video, stretched."""
    data = torch.from_numpy(given.data.copy())
    if given.kind == IMAGE:
        pixels = data.permute(2, 0, 1).unsqueeze(0).float()
        scale = max(shape.width / pixels.shape[3], shape.height / pixels.shape[2])
        size = [math.ceil(scale * pixels.shape[2]), math.ceil(scale * pixels.shape[3])]
        pixels = interpolate(pixels, size=size, mode="bilinear", align_corners=False, antialias=True)
        top, left = round((size[0] - shape.height) / 2), round((size[1] - shape.width) / 2)
        pixels = pixels[:, :, top : top + shape.height, left : left + shape.width].round().clamp(0, 255)
    else:
        import numpy as np
        from PIL import Image

        chosen = given.data[-count:] if last else given.data[:count]
        small = [Image.fromarray(each).resize((shape.width, shape.height), Image.Resampling.BILINEAR) for each in chosen]
        pixels = torch.from_numpy(np.stack([np.asarray(each) for each in small])).permute(0, 3, 1, 2).float()
    return (pixels / 127.5 - 1).permute(1, 0, 2, 3)
