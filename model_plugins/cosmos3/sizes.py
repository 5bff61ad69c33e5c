"""How large things are: what is to be made, in pixels and frames, and what that takes of a device's memory. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_omni.api import IMAGE, VIDEO, Job, Kind, Memory, RequestError, StageContext

FRAMES = 189
"""Of a video, unless another number is asked for: what the model was trained on."""
MOST = 131_072
"""Tokens of a sample, at most: three times the longest video that the model was trained on. A larger one would hold up all others."""
SIDE = 8192
"""Pixels of a side, at most."""
PROMPT = 1024
"""Tokens of a prompt that memory is kept for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is to be made: pictures (one frame) or videos, in pixels and frames a second."""

    frames: int
    height: int
    width: int
    fps: float = 24.0

    @property
    def what(self) -> str:
        return "image" if self.frames == 1 else "video"


def shape_of(asked: Mapping[str, Any], outputs: Collection[Kind], unit: int) -> Shape:
    """What a request asks for; sides are multiples of `unit`. Raises RequestError."""
    told = re.fullmatch(r"(\d{1,5})x(\d{1,5})", asked["size"])
    if told is None:
        raise RequestError(f"'size' is '{asked['size']}'; it must be WIDTHxHEIGHT in pixels, such as 1280x720.", param="size")
    width, height = int(told[1]), int(told[2])
    near = "x".join(str(min(SIDE, max(unit, round(side / unit) * unit))) for side in (width, height))
    if near != f"{width}x{height}":
        said = f"'size' is {width}x{height}; both must be multiples of {unit}, and at most {SIDE}. The nearest is {near}."
        raise RequestError(said, param="size")
    if IMAGE not in outputs:
        if asked["partial_images"]:
            raise RequestError("'partial_images' are of a picture, and a video is asked for: leave it out.", param="partial_images")
        return Shape(asked["num_frames"] or FRAMES, height, width, asked["fps"])
    if VIDEO in outputs:
        raise RequestError("Ask for a picture or for a video: one request makes one of them.", param="modalities")
    if asked["num_frames"] not in (None, 1):
        said = f"'num_frames' is {asked['num_frames']}, and a picture has one: leave it out, or ask for a video."
        raise RequestError(said, param="num_frames")
    return Shape(1, height, width, asked["fps"])


@dataclass(frozen=True, slots=True)
class Config:
    """What `transformer/config.json` says; the defaults are those of the Nano size."""

    head_dim: int = 128
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_attention_heads: int = 32
    num_hidden_layers: int = 36
    num_key_value_heads: int = 8
    vocab_size: int = 151936
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qk_norm_for_text: bool = True
    use_und_k_norm_for_gen: bool = False
    rope_theta: float = 5_000_000.0
    rope_axes_dim: tuple[int, int, int] = (24, 20, 20)
    base_fps: float = 24.0
    enable_fps_modulation: bool = True
    latent_channel: int = 48
    latent_patch_size: int = 2
    unified_3d_mrope_reset_spatial_ids: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15_000
    timestep_scale: float = 0.001

    @classmethod
    def read(cls, folder: Path) -> Config:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        axes = told.get("rope_axes_dim") or (told.get("rope_scaling") or {}).get("mrope_section")
        told["rope_axes_dim"] = tuple(axes) if axes else None
        return cls(**{each.name: told[each.name] for each in fields(cls) if told.get(each.name) is not None})

    @property
    def patch_dim(self) -> int:
        """Numbers in a token of latents: the channels of a patch."""
        return self.latent_channel * self.latent_patch_size**2

    @property
    def gates(self) -> int:
        """Products of the first half of a feed-forward."""
        return 1 if self.hidden_act == "relu2" else 2


def dtype_of(ctx: StageContext) -> str:
    """What torch calls the type of a stage's weights."""
    told: str = ctx.args["dtype"]
    return told if told != "auto" else "float32" if ctx.device == "cpu" else "bfloat16"


def _wide(ctx: StageContext) -> int:
    return 4 if dtype_of(ctx) == "float32" else 2


def denoiser(ctx: StageContext, job: Job | None) -> Memory:
    """Of the Denoise stage: both towers and the encoder; of a job its samples and prompts; of a forward its activations."""
    config, vae = Config.read(Path(ctx.model, "transformer")), json.loads(Path(ctx.model, "vae/config.json").read_text(encoding="utf-8"))
    wide, hidden, head = _wide(ctx), config.hidden_size, config.head_dim
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    layer = (
        hidden * head * (heads + config.num_attention_heads) + (config.gates + 1) * hidden * config.intermediate_size + 2 * (hidden + head)
    )
    layers = config.num_hidden_layers if ctx.args["offload"] == "none" else 2
    weights = 2 * layers * layer + config.vocab_size * hidden + 2 * config.patch_dim * hidden
    exact = 4 * (256 * hidden + hidden * hidden + 2 * hidden)
    held = weights * wide + exact + _part(ctx, ("encoder.", "quant_conv."))
    if job is None:
        return Memory(held, 0, 0)
    shape = shape_of(job.params, job.outputs, vae["scale_factor_spatial"])
    side = vae["scale_factor_spatial"] * config.latent_patch_size
    frames = (shape.frames - 1) // vae["scale_factor_temporal"] + 1
    tokens = frames * -(-shape.height // side) * -(-shape.width // side)
    if tokens > MOST:
        said = f"'size' and 'num_frames' make {tokens} tokens, and {MOST} is the most: ask for a smaller size, or fewer frames."
        raise RequestError(said, param="size" if frames == 1 else "num_frames")
    passes, n = 1 if job.params["guidance_scale"] == 1.0 else 2, job.params["n"]
    prompt = PROMPT * config.num_hidden_layers * 2 * config.num_key_value_heads * head * wide
    row = tokens * (8 * config.patch_dim * 4 + passes * 2 * (head * 4 + 16))
    activations = 2 * hidden + 2 * heads * head + config.num_attention_heads * head + (config.gates + 1) * config.intermediate_size
    return Memory(held, n * row + 2 * passes * prompt, passes * tokens * (activations * wide + 3 * config.patch_dim * 4))


def _part(ctx: StageContext, begins: tuple[str, ...]) -> int:
    """Bytes of the autoencoder's weights whose names begin so, by the header of its file; 0 without one."""
    file = Path(ctx.model, "vae/diffusion_pytorch_model.safetensors")
    if not file.is_file():
        return 0
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    sizes = [told["shape"] for name, told in header.items() if name.startswith(begins)]
    count = 0
    for shape in sizes:
        product = 1
        for side in shape:
            product *= side
        count += product
    return count * _wide(ctx)
