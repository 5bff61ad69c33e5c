"""The Denoise stage: from words, and a picture or a video to go on from, to latents."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from vllm_omni.api import IMAGE, TEXT, VIDEO, DenoiseModule, Job, Payload, RequestError, Row, StageContext
from vllm_omni.kit.solvers import shifted, unipc

from .autoencoder import Autoencoder, frames_of
from .layout import Shape, positions, prompt_ids, sentences, to_latents, to_tokens
from .plugin import LATENTS
from .transformer import Pass, load, rotary


class Denoiser(DenoiseModule):
    """Both towers, and the encoder for what is given."""

    def load(self, ctx: StageContext) -> None:
        folder = Path(ctx.model)
        self.device = ctx.device
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(ctx.args["dtype"])
        self.understanding, self.generation = load(
            folder / "transformer", ctx.device, dtype or (torch.float32 if ctx.device == "cpu" else torch.bfloat16)
        )
        self.config = self.generation.config
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "text_tokenizer")
        self.autoencoder = Autoencoder(folder / "vae", ctx.device, ctx.args["dtype"])
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        self.system = index.get("default_use_system_prompt", True)
        self.native = index.get("use_native_flow_schedule", False)
        self.scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text(encoding="utf-8"))

    def prepare(self, job: Job, parts: Sequence[Payload]) -> Sequence[Row]:
        asked, shape = job.params, self._shape(job.params)
        seed = secrets.randbits(32) if asked["seed"] is None else asked["seed"]
        grid = self.autoencoder.grid(shape)
        given, kept = self._given(asked, shape, parts)
        noise = torch.randn(grid, generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(grid)
        mask[:, kept] = 0
        start = noise if given is None else torch.where(mask.bool(), noise, given)
        patch = self.config.latent_patch_size
        real = to_tokens(mask, patch).to(self.device)
        prompt = "\n".join(part.data for part in parts if part.kind == TEXT)
        prompts = [(prompt, False), (asked["negative_prompt"], True)][: 1 if asked["guidance_scale"] == 1.0 else 2]
        passes = [self._pass(sentences(
            text, shape, negative=no, duration=asked["use_duration_template"], resolution=asked["use_resolution_template"]
        ), shape, grid, real) for text, no in prompts]  # fmt: skip
        solver, times = self._solver(asked)
        return [
            Row(to_tokens(start, patch).to(self.device), solver, times, passes, asked["guidance_scale"], real, (grid, shape, seed)),
        ]

    def _shape(self, asked: Any) -> Shape:
        told = re.fullmatch(r"(\d{1,5})x(\d{1,5})", asked["size"])
        if told is None:
            raise RequestError(f"'size' is '{asked['size']}'; it must be WIDTHxHEIGHT in pixels, such as 1280x720.", param="size")
        width, height, unit = int(told[1]), int(told[2]), self.autoencoder.spatial
        if width % unit or height % unit or not width or not height:
            near = "x".join(str(max(unit, round(side / unit) * unit)) for side in (width, height))
            raise RequestError(f"'size' is {width}x{height}; both must be multiples of {unit}. The nearest is {near}.", param="size")
        return Shape(asked["num_frames"], height, width, asked["fps"])

    def _given(self, asked: Any, shape: Shape, parts: Sequence[Payload]) -> tuple[Tensor | None, list[int]]:
        """The latents of what is given, and which of their frames stay."""
        media = [part for part in parts if part.kind in (IMAGE, VIDEO)]
        if len(media) > 1:
            raise RequestError("Give one picture or one video to go on from.", param="messages")
        if not media:
            return None, []
        latent_frames = self.autoencoder.grid(shape)[1]
        if shape.frames == 1:
            raise RequestError("What goes on from a picture or a video is a video: set 'num_frames' above 1.", param="num_frames")
        kept = [0] if media[0].kind == IMAGE else (asked["condition_frame_indexes_vision"] or [0, 1])
        wrong = [each for each in kept if not 0 <= each < latent_frames]
        if wrong:
            said = (
                f"'condition_frame_indexes_vision' has {wrong[0]}, but {shape.frames} frames have latent frames 0 to {latent_frames - 1}."
            )
            raise RequestError(said, param="condition_frame_indexes_vision")
        count = 1 if media[0].kind == IMAGE else max(kept) * self.autoencoder.temporal + 1
        frames = frames_of(media[0], shape, count, last=asked["condition_video_keep"] == "last")
        filled = torch.cat([frames[:, : shape.frames], frames[:, -1:].expand(-1, max(0, shape.frames - frames.shape[1]), -1, -1)], dim=1)
        return self.autoencoder.encode(filled), kept

    def _pass(self, text: str, shape: Shape, grid: tuple[int, int, int, int], real: Tensor) -> Pass:
        ids = prompt_ids(self.tokenizer, text, shape.what, system=self.system)
        patch = self.config.latent_patch_size
        places = positions(
            self.config, len(ids), (grid[1], -(-grid[2] // patch), -(-grid[3] // patch)), shape.fps, self.autoencoder.temporal
        )
        cos, sin = rotary(self.config, places.to(self.device))
        return Pass(len(real), self.understanding(ids), cos, sin, real.amax(1, keepdim=True))

    def _solver(self, asked: Any) -> tuple[Any, list[float]]:
        """As the checkpoint's scheduler, a UniPCMultistepScheduler with flow sigmas, would have it. Timesteps are whole numbers there."""
        steps, trained = asked["num_inference_steps"], self.scheduler["num_train_timesteps"]
        begin, end = (1 - 1 / trained, 0.0) if self.native else (1.0, 1 / trained)
        shift = asked["flow_shift"] or self.scheduler.get("flow_shift", 1.0)
        levels = shifted(torch.linspace(begin, end, steps + 1, dtype=torch.float64)[:-1], shift)
        levels[0] = min(float(levels[0]), 1 - 1e-6)
        solver = unipc(torch.cat([levels, levels.new_zeros(1)]), self.scheduler.get("solver_order", 2))
        return solver, [float(int(level * trained)) for level in levels.tolist()]

    @torch.inference_mode()
    def predict(self, passes: Sequence[Pass], tokens: Tensor, times: Tensor) -> Iterable[Tensor | None]:
        yield from self.generation.velocities(passes, tokens, times)

    def finish(self, row: Row, tokens: Tensor) -> Iterable[Payload]:
        grid, shape, seed = row.state
        latents = to_latents(tokens, grid, self.config.latent_patch_size)
        yield Payload(LATENTS, latents.contiguous().cpu(), {"fps": shape.fps, "seed": seed})
