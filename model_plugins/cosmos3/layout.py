"""Where Cosmos3's tokens are: prompts as the model was trained on them, latents cut into tokens, and the positions of both.

Source: `Cosmos3OmniPipeline` of diffusers 0.42 (Apache-2.0), which the tests compare with.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_omni.api import RequestError

from .sizes import Config, Shape

log = logging.getLogger(__name__)

MOST = 8192
"""Tokens of a prompt. The longest captions that the model was trained on have a thousand."""

SYSTEM = "You are a helpful assistant who will generate {what}s from a give prompt."  # as it was trained: "a give prompt"


def sentences(prompt: str, shape: Shape, *, negative: bool = False, duration: bool = True, resolution: bool = True) -> str:
    """The prompt with what it says of the duration and the size; a negative one says that it is not so."""
    no = "not " if negative else ""
    said = []
    if duration and shape.frames > 1:
        seconds = shape.frames / shape.fps
        said.append(f"The video is {no}{seconds:.1f} seconds long and is {no}of {shape.fps:.0f} FPS.")
    if resolution:
        said.append(f"This {shape.what} is {no}of {shape.height}x{shape.width} resolution.")
    for sentence in said:
        prompt = prompt.rstrip(".")
        prompt = f"{prompt}. {sentence}" if prompt else sentence
    return prompt


def cut(tokenizer: Any, prompt: str, most: int | None, param: str) -> str:
    """The prompt, or the first `most` tokens of it, with a warning (None: all of it). Raises RequestError, of `param`, beyond MOST."""
    said = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if most is None and len(said) > MOST:
        wrong = f"'{param}' has {len(said)} tokens, and {MOST} is the most: send a shorter one, or cut it with 'max_sequence_length'."
        raise RequestError(wrong, param=param)
    if most is None or len(said) <= most:
        return prompt
    log.warning("A prompt of %d tokens is cut to the %d that 'max_sequence_length' allows.", len(said), most)
    return str(tokenizer.decode(said[:most]))


def prompt_ids(tokenizer: Any, text: str, what: str, *, system: bool = True) -> list[int]:
    """The token ids of the understanding tower: the chat, its end, and the mark where generation begins."""
    turns = [{"role": "system", "content": SYSTEM.format(what=what)}] if system else []
    shown = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, add_vision_id=False, return_dict=True
    )
    return [*shown["input_ids"], tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|vision_start|>")]


def to_tokens(latents: Tensor, patch: int) -> Tensor:
    """Latents [channels, frames, height, width] as tokens [tokens, channels * patch * patch]; odd edges are filled with zeros."""
    _, _, height, width = latents.shape
    filled = pad(latents, (0, -width % patch, 0, -height % patch))
    cut = filled.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # c t h p w q
    return cut.permute(1, 2, 4, 3, 5, 0).flatten(3).flatten(0, 2)


def to_latents(tokens: Tensor, shape: tuple[int, int, int, int], patch: int) -> Tensor:
    """The latents of `shape` that `to_tokens` was given."""
    channels, frames, height, width = shape
    cut = tokens.view(frames, -(-height // patch), -(-width // patch), patch, patch, channels)
    return cut.permute(5, 0, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)[:, :, :height, :width]


def positions(config: Config, prompt: int, grid: tuple[int, int, int], fps: float, compression: int) -> Tensor:
    """Positions [3, tokens] in time, height and width of a grid of latent tokens after a prompt of that many tokens.

    `compression`: frames of video to one of latents. Time runs at the pace of the video: at twice the frames a second half as fast.
    """
    frames, height, width = grid
    begin = prompt + config.unified_3d_mrope_temporal_modality_margin
    time = torch.arange(frames, dtype=torch.float32)
    if config.enable_fps_modulation and frames > 1:
        time = time / (fps / compression) * (config.base_fps / compression)
    space = 0 if config.unified_3d_mrope_reset_spatial_ids else begin
    axes = torch.meshgrid(time + begin, torch.arange(height) + float(space), torch.arange(width) + float(space), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])
