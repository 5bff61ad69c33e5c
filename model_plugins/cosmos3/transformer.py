"""Cosmos3's mixture of two transformers, computed the way a server wants it.

The understanding tower reads the prompt, causally. The generation tower denoises latents; each of its layers also attends to what the
understanding tower's layer of the same depth has of the prompt. That does not depend on the noise, so it is computed once per request
(`understand`), and a step is the generation tower alone (`Generation.velocities`), over the packed tokens of any requests.

Source of the formulas: the report on Cosmos3, and `Cosmos3OmniTransformer` of diffusers 0.42 (Apache-2.0), which the tests compare with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import relu, rms_norm, scaled_dot_product_attention, silu

KeyValues = list[tuple[Tensor, Tensor]]
"""For each layer the keys and the values [tokens, heads, head_dim] of a prompt."""


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
        axes = told.get("rope_axes_dim") or (told.get("rope_scaling") or {}).get("mrope_section") or cls.rope_axes_dim
        known = {name: told[name] for name in cls.__slots__ if told.get(name) is not None}
        return cls(**{**known, "rope_axes_dim": tuple(axes)})

    @property
    def patch_dim(self) -> int:
        """Numbers in a token of latents: the channels of a patch."""
        return self.latent_channel * self.latent_patch_size**2


def rotary(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 1, head_dim], float32, for positions [3, tokens] in time, height and width.

    The frequencies of the three axes are interleaved, as in Qwen3-VL: every third is one of height, every third one of width, as long as
    those axes have some; the rest are of time.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions.float().unsqueeze(-1) * (1.0 / config.rope_theta**exponents)
    mixed = angles[0].clone()
    for axis in (1, 2):
        place = slice(axis, config.rope_axes_dim[axis] * 3, 3)
        mixed[:, place] = angles[axis][:, place]
    both = torch.cat([mixed, mixed], dim=-1).unsqueeze(1)
    return both.cos(), both.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _attend(query: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> Tensor:
    """[queries, heads * head_dim], of queries [queries, heads, head_dim] and fewer heads of keys and values."""
    parts = [each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values)]
    found = scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)
    return found.squeeze(0).transpose(0, 1).flatten(1)


class Layer(nn.Module):
    """One layer of a tower. Queries, keys and values are one product, and so are gate and up."""

    def __init__(self, config: Config, norms_keys_for: str, **kind: Any) -> None:
        super().__init__()
        heads, kept, wide = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.config, self.split = config, (heads, kept, kept)
        self.qkv = nn.Linear(wide, (heads + 2 * kept) * config.head_dim, bias=config.attention_bias, **kind)
        self.out = nn.Linear(heads * config.head_dim, wide, bias=config.attention_bias, **kind)
        gates = 1 if config.hidden_act == "relu2" else 2
        self.up = nn.Linear(wide, gates * config.intermediate_size, bias=False, **kind)
        self.down = nn.Linear(config.intermediate_size, wide, bias=False, **kind)
        self.before, self.between = (nn.Parameter(torch.empty(wide, **kind)) for _ in range(2))
        normed = norms_keys_for == "generation" or config.qk_norm_for_text
        self.query_norm, self.key_norm = (nn.Parameter(torch.empty(config.head_dim, **kind)) if normed else None for _ in range(2))
        extra = norms_keys_for == "understanding" and config.use_und_k_norm_for_gen and not config.qk_norm_for_text
        self.key_norm_for_generation = nn.Parameter(torch.empty(config.head_dim, **kind)) if extra else None

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, and the keys that the other tower sees, [tokens, heads, head_dim] each."""
        heads = self.qkv(self.norm(x, self.before)).unflatten(-1, (-1, self.config.head_dim))
        query, key, value = heads.split(self.split, dim=1)
        query, key = self.norm(query, self.query_norm), self.norm(key, self.key_norm)
        shown = key if self.key_norm_for_generation is None else self.norm(key, self.key_norm_for_generation)
        query, key, shown = (_turned(each, cos, sin) for each in (query, key, shown))
        return query, key, value, shown

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended)
        wide = self.up(self.norm(x, self.between))
        if self.config.hidden_act == "relu2":
            return x + self.down(relu(wide).square())
        gate, up = wide.chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


class Understanding(nn.Module):
    """The tower that reads prompts."""

    def __init__(self, config: Config, **kind: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **kind))
        self.layers = nn.ModuleList(Layer(config, "understanding", **kind) for _ in range(config.num_hidden_layers))

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> KeyValues:
        """What the generation tower sees of a prompt. The last layer's own output is of no use to it."""
        x = self.embed[torch.tensor(ids, device=self.embed.device)]
        cos, sin = (each.to(x.dtype) for each in rotary(self.config, torch.arange(len(ids), device=x.device).expand(3, -1)))
        seen: KeyValues = []
        for layer in self.layers:
            query, key, value, shown = layer.project(x, cos, sin)
            seen.append((shown, value))
            if len(seen) < len(self.layers):
                x = layer.rest(x, _attend(query, key, value, causal=True))
        return seen


@dataclass(slots=True)
class Pass:
    """Tokens of one request under one prompt: how many, what is seen of the prompt, and where the tokens are.

    `moving` [tokens, 1] is 1 where a token is denoised, and 0 where it is a condition; `cos` and `sin` are those of `rotary`.
    """

    tokens: int
    prompt: KeyValues
    cos: Tensor
    sin: Tensor
    moving: Tensor


class Generation(nn.Module):
    """The tower that denoises."""

    def __init__(self, config: Config, **kind: Any) -> None:
        super().__init__()
        self.config = config
        self.take = nn.Linear(config.patch_dim, config.hidden_size, **kind)
        self.give = nn.Linear(config.hidden_size, config.patch_dim, **kind)
        exact = {**kind, "dtype": torch.float32}
        self.time_in, self.time_out = (
            nn.Linear(256, config.hidden_size, **exact),
            nn.Linear(config.hidden_size, config.hidden_size, **exact),
        )
        self.layers = nn.ModuleList(Layer(config, "generation", **kind) for _ in range(config.num_hidden_layers))
        self.last = nn.Parameter(torch.empty(config.hidden_size, **kind))

    def velocities(self, passes: Sequence[Pass], tokens: Tensor, times: Tensor) -> Iterator[Tensor | None]:
        """Yields None after each layer, and at last the velocities [tokens, patch_dim], float32, of packed `tokens` of all passes.

        `times` [tokens, 1] are the timesteps, 0 to 1000. Conditions have the velocity 0.
        """
        kind = self.take.weight.dtype
        counts = [each.tokens for each in passes]
        cos, sin = (torch.cat([getattr(each, name) for each in passes]).to(kind) for name in ("cos", "sin"))
        moving = torch.cat([each.moving for each in passes])
        x = self.take(tokens.to(kind)) + (self._time(times) * moving).to(kind)
        for depth, layer in enumerate(self.layers):
            query, key, value, _ = layer.project(x, cos, sin)
            attended = [
                _attend(own_query, torch.cat([each.prompt[depth][0], own_key]), torch.cat([each.prompt[depth][1], own_value]))
                for each, own_query, own_key, own_value in zip(passes, *(part.split(counts) for part in (query, key, value)), strict=True)
            ]
            x = layer.rest(x, torch.cat(attended))
            yield None
        x = rms_norm(x, (x.shape[-1],), self.last, self.config.rms_norm_eps)
        yield self.give(x).float() * moving

    def _time(self, times: Tensor) -> Tensor:
        """Sinusoids of 128 frequencies, through two layers: [tokens, hidden_size], float32."""
        steps = torch.arange(128, dtype=torch.float32, device=times.device) / 128
        angles = times.float() * self.config.timestep_scale * torch.exp(-torch.log(torch.tensor(10_000.0)) * steps)
        return self.time_out(silu(self.time_in(torch.cat([angles.cos(), angles.sin()], dim=-1))))


_NAMES = {
    "understanding": {
        "qkv": ("self_attn.to_q", "self_attn.to_k", "self_attn.to_v"), "out": ("self_attn.to_out",),
        "up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
        "before": ("input_layernorm",), "between": ("post_attention_layernorm",),
        "query_norm": ("self_attn.norm_q",), "key_norm": ("self_attn.norm_k",),
        "key_norm_for_generation": ("self_attn.k_norm_und_for_gen",),
    },
    "generation": {
        "qkv": ("self_attn.add_q_proj", "self_attn.add_k_proj", "self_attn.add_v_proj"), "out": ("self_attn.to_add_out",),
        "up": ("mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj"), "down": ("mlp_moe_gen.down_proj",),
        "before": ("input_layernorm_moe_gen",), "between": ("post_attention_layernorm_moe_gen",),
        "query_norm": ("self_attn.norm_added_q",), "key_norm": ("self_attn.norm_added_k",),
    },
}  # fmt: skip
"""What the published layout calls the parts of a layer, in the order in which they are put together."""
_OUTSIDE = {
    "embed": "embed_tokens.weight", "take": "proj_in", "give": "proj_out", "time_in": "time_embedder.linear_1",
    "time_out": "time_embedder.linear_2", "last": "norm_moe_gen.weight",
}  # fmt: skip


def _sources(config: Config, tower: str, name: str) -> list[str]:
    """The names in the checkpoint of what a parameter is made of."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return [f"{_OUTSIDE[first]}.{rest}" if rest else _OUTSIDE[first]]
    number, part, *kind = rest.split(".")
    parts = _NAMES[tower][part]
    if part == "up" and config.hidden_act == "relu2":
        parts = parts[1:]
    return [f"layers.{number}.{each}.{kind[0] if kind else 'weight'}" for each in parts]


def load(folder: Path, device: str = "cpu", dtype: Any = torch.float32) -> tuple[Understanding, Generation]:
    """Both towers of a checkpoint's `transformer` folder, each weight read straight to the device. Raises KeyError for a missing one."""
    config = Config.read(folder)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        single = "diffusion_pytorch_model.safetensors"
        with safe_open(folder / single, "pt") as opened:
            files = dict.fromkeys(opened.keys(), single)
    opened = {name: safe_open(folder / name, "pt", device=device) for name in set(files.values())}
    towers = Understanding(config, device="meta", dtype=dtype), Generation(config, device="meta", dtype=dtype)
    for tower, kind in zip(towers, _NAMES, strict=True):
        weights = {}
        for name, parameter in tower.named_parameters():
            parts = [opened[files[each]].get_tensor(each) for each in _sources(config, kind, name)]
            weights[name] = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(parameter.dtype)
        tower.load_state_dict(weights, assign=True)
        tower.requires_grad_(False)
    return towers
