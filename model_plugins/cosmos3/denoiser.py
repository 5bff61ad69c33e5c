"""The Denoise stage: from words, and a picture or a video to go on from, to latents."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from vllm_omni.api import IMAGE, TEXT, VIDEO, DenoiseModule, Job, Payload, RequestError, Row, SettingError, StageContext
from vllm_omni.kit.attention import by_torch, choose
from vllm_omni.kit.solvers import shifted, unipc

from .autoencoder import Autoencoder, frames_of
from .guardrail import Guardrail, wanted
from .layout import cut, positions, prompt_ids, sentences, to_latents, to_tokens
from .packed import Packed, Pass, Replayed
from .plugin import LATENTS
from .sizes import Config, Shape, dtype_of, shape_of
from .transformer import reader, rotary, towers


class Denoiser(DenoiseModule):
    """Both towers, and the encoder for what is given."""

    def load(self, ctx: StageContext) -> None:
        folder = Path(ctx.model)
        self.device = ctx.device
        self.config = Config.read(folder / "transformer")
        offload = ctx.args["offload"] == "layers"
        if offload and ctx.device == "cpu":
            said = f"'{ctx.stage}.offload' is layers, and on a CPU there is nothing to offload to: leave it out."
            raise SettingError(said, param=f"stages.{ctx.stage}.args.offload")
        self.guardrail = Guardrail(ctx) if ctx.args["guardrail"] else None
        read = None if ctx.args["load_format"] == "dummy" else reader(folder / "transformer")
        self.understanding, self.generation = towers(self.config, read, ctx.device, getattr(torch, dtype_of(ctx)), offload=offload)
        kernel = choose(ctx.device, self.generation.take.weight.dtype, self.config.head_dim)
        # torch's goes by lengths on the host, and offloading by what was copied: a recording would not see them change.
        self.replayed = None if kernel is by_torch or offload else Replayed(self.generation.velocities, ctx.device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "text_tokenizer")
        self.autoencoder = Autoencoder(ctx, encodes=True)
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        self.system = index.get("default_use_system_prompt", True)
        self.native = index.get("use_native_flow_schedule", False)
        self.scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text(encoding="utf-8"))

    def prepare(self, job: Job, parts: Sequence[Payload]) -> Iterable[Row | None]:
        asked, shape = job.params, shape_of(job.params, job.outputs, self.autoencoder.spatial)
        seed = secrets.randbits(32) if asked["seed"] is None else asked["seed"]
        grid = self.autoencoder.grid(shape)
        given, kept = self._given(asked, shape, parts)
        yield None
        mask = torch.ones(grid)
        mask[:, kept] = 0
        patch = self.config.latent_patch_size
        real = to_tokens(mask, patch).to(self.device)
        prompt = "\n".join(part.data for part in parts if part.kind == TEXT)
        if guardrail := wanted(self.guardrail, asked["guardrails"]):
            guardrail.check(prompt)
            yield None
        passes = []
        for text, no in [(prompt, False), (asked["negative_prompt"], True)][: 1 if asked["guidance_scale"] == 1.0 else 2]:
            with_size, with_time = asked["use_resolution_template"], asked["use_duration_template"]
            words = cut(self.tokenizer, text, asked["max_sequence_length"], "negative_prompt" if no else "prompt")
            said = sentences(words, shape, negative=no, duration=with_time, resolution=with_size)
            passes.append(self._pass(said, shape, grid, real))
            yield None
        solver, times = self._solver(asked)
        previews = tuple(round(solver.steps * (number + 1) / (asked["partial_images"] + 1)) for number in range(asked["partial_images"]))
        for index in range(asked["n"]):
            noise = torch.randn(grid, generator=torch.Generator().manual_seed(seed + index))
            start = to_tokens(noise if given is None else torch.where(mask.bool(), noise, given), patch).to(self.device)
            state = (grid, {"fps": shape.fps, "seed": seed + index, "index": index})
            yield Row(
                start,
                solver,
                times,
                passes,
                asked["guidance_scale"],
                real if kept or grid[2] % patch or grid[3] % patch else None,
                previews,
                state,
            )

    def _given(self, asked: Any, shape: Shape, parts: Sequence[Payload]) -> tuple[Tensor | None, list[int]]:
        """The latents of what is given, and which of their frames stay."""
        media = [part for part in parts if part.kind in (IMAGE, VIDEO)]
        if len(media) > 1:
            raise RequestError("Give one picture or one video to go on from.", param="messages")
        if not any(part.kind == VIDEO for part in media):
            for name, default in (("condition_frame_indexes_vision", None), ("condition_video_keep", "first")):
                if asked[name] != default:
                    raise RequestError(f"'{name}' is of a video to go on from, and none is given: leave it out.", param=name)
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
        filled = torch.cat([frames, frames[:, -1:].expand(-1, max(0, count - frames.shape[1]), -1, -1)], dim=1)
        # What comes later has no influence on these: the encoder is causal.
        latents = self.autoencoder.encode(filled)
        return torch.cat([latents, latents.new_zeros(len(latents), latent_frames - latents.shape[1], *latents.shape[2:])], dim=1), kept

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

    def pack(self, passes: Sequence[Pass]) -> Packed:
        return Packed.of(passes, filled=self.replayed is not None and Packed.recordable(passes))

    def predict(self, packed: Packed, tokens: Tensor, times: Tensor) -> Iterable[Tensor | None]:
        if packed.filled:
            yield self.replayed(packed, tokens, times)
        else:
            yield from self.generation.velocities(packed, tokens, times)

    def finish(self, row: Row, tokens: Tensor) -> Iterable[Payload]:
        grid, meta = row.state
        yield Payload(LATENTS, to_latents(tokens, grid, self.config.latent_patch_size).contiguous(), meta)
