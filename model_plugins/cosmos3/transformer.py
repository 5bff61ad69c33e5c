"""Cosmos3's mixture of two transformers, computed the way a server wants it.

The understanding tower reads the prompt, causally. The generation tower denoises latents; each of its layers also attends to what the
understanding tower's layer of the same depth has of the prompt. That does not depend on the noise, so it is computed once per request
(`understand`), and a step is the generation tower alone (`Generation.velocities`), over the packed tokens of any requests.

Source of the formulas: the report on Cosmos3, and `Cosmos3OmniTransformer` of diffusers 0.42 (Apache-2.0), which the tests compare with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import relu, rms_norm, scaled_dot_product_attention, silu

from vllm_omni.kit.attention import choose
from vllm_omni.kit.fused import gated, placed, turned

from .packed import Packed
from .sizes import Config

SLICE = 20_000
"""Tokens, times layers, after which a forward on a GPU lets others go on: some milliseconds."""


def rotary(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, head_dim / 2], float32, for positions [3, tokens] in time, height and width.

    The frequencies of the three axes are interleaved, as in Qwen3-VL: every third is one of height, every third one of width, as long as
    those axes have some; the rest are of time.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions.float().unsqueeze(-1) * (1.0 / config.rope_theta**exponents)
    mixed = angles[0].clone()
    for axis in (1, 2):
        place = slice(axis, config.rope_axes_dim[axis] * 3, 3)
        mixed[:, place] = angles[axis][:, place]
    return mixed.cos(), mixed.sin()


def _causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[tokens, heads * head_dim], of queries [tokens, heads, head_dim] and fewer heads of keys and values."""
    parts = [each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values)]
    found = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return found.squeeze(0).transpose(0, 1).flatten(1)


class Layer(nn.Module):
    """One layer of a tower. Queries, keys and values are one product, and so are gate and up."""

    def __init__(self, config: Config, norms_keys_for: str, **kind: Any) -> None:
        super().__init__()
        heads, kept, wide = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.config, self.split = config, (heads, kept, kept)
        self.qkv = nn.Linear(wide, (heads + 2 * kept) * config.head_dim, bias=config.attention_bias, **kind)
        self.out = nn.Linear(heads * config.head_dim, wide, bias=config.attention_bias, **kind)
        self.up = nn.Linear(wide, config.gates * config.intermediate_size, bias=False, **kind)
        self.down = nn.Linear(config.intermediate_size, wide, bias=False, **kind)
        self.before, self.between = (nn.Parameter(torch.empty(wide, **kind)) for _ in range(2))
        normed = norms_keys_for == "generation" or config.qk_norm_for_text
        self.query_norm, self.key_norm = (nn.Parameter(torch.empty(config.head_dim, **kind)) if normed else None for _ in range(2))
        extra = norms_keys_for == "understanding" and config.use_und_k_norm_for_gen and not config.qk_norm_for_text
        self.key_norm_for_generation = nn.Parameter(torch.empty(config.head_dim, **kind)) if extra else None

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """Queries, keys and values, as yet neither normed nor turned: [tokens, heads, head_dim]."""
        return self.qkv(self.norm(x, self.before)).unflatten(-1, (-1, self.config.head_dim))

    def read(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, and the keys that the other tower sees, [tokens, heads, head_dim] each, of a prompt."""
        query, key, value = self.heads(x).split(self.split, dim=1)
        query, key = self.norm(query, self.query_norm), self.norm(key, self.key_norm)
        shown = key if self.key_norm_for_generation is None else self.norm(key, self.key_norm_for_generation)
        query, key, shown = (turned(each, cos, sin) for each in (query, key, shown))
        return query, key, value, shown

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = _added(x, attended, self.out)
        wide = self.up(self.norm(x, self.between))
        return _added(x, relu(wide).square() if self.config.hidden_act == "relu2" else gated(wide), self.down)


def _added(x: Tensor, inner: Tensor, to: nn.Linear) -> Tensor:
    """`x + to(inner)`, in one product."""
    return torch.addmm(x if to.bias is None else x + to.bias, inner, to.weight.t())


class Understanding(nn.Module):
    """The tower that reads prompts."""

    def __init__(self, config: Config, **kind: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **kind))
        self.layers = nn.ModuleList(Layer(config, "understanding", **kind) for _ in range(config.num_hidden_layers))

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> Tensor:
        """What the generation tower sees of a prompt: [layers, 2, tokens, kv heads, head_dim], the keys and the values.

        The last layer's own output is of no use to it.
        """
        x = self.embed[torch.tensor(ids, device=self.embed.device)]
        cos, sin = (each.unsqueeze(1) for each in rotary(self.config, torch.arange(len(ids), device=x.device).expand(3, -1)))
        seen = x.new_empty(len(self.layers), 2, len(ids), self.config.num_key_value_heads, self.config.head_dim)
        for depth, layer in enumerate(self.layers):
            query, key, value, shown = layer.read(x, cos, sin)
            seen[depth, 0], seen[depth, 1] = shown, value
            if depth < len(self.layers) - 1:
                x = layer.rest(x, _causal(query, key, value))
        return seen


class Generation(nn.Module):
    """The tower that denoises."""

    def __init__(self, config: Config, **kind: Any) -> None:
        super().__init__()
        self.config = config
        self.take = nn.Linear(config.patch_dim, config.hidden_size, **kind)
        self.give = nn.Linear(config.hidden_size, config.patch_dim, **kind)
        exact = {**kind, "dtype": torch.float32}
        self.time_in = nn.Linear(256, config.hidden_size, **exact)
        self.time_out = nn.Linear(config.hidden_size, config.hidden_size, **exact)
        self.layers = nn.ModuleList(Layer(config, "generation", **kind) for _ in range(config.num_hidden_layers))
        self.last = nn.Parameter(torch.empty(config.hidden_size, **kind))

    def velocities(self, packed: Packed, tokens: Tensor, times: Tensor) -> Iterator[Tensor | None]:
        """Yields None after some layers, and at last the velocities [tokens, patch_dim], float32, of the `tokens` of all passes.

        `times` [passes] are their timesteps, 0 to 1000. Conditions have the velocity 0.
        """
        kind, config = self.take.weight.dtype, self.config
        attend = choose(tokens.device.type, kind, config.head_dim)
        x = self.take(tokens.to(kind)) + (self._time(times).index_select(0, packed.passing) * packed.moving).to(kind)
        query = x.new_empty(len(x), config.num_attention_heads, config.head_dim)
        keys, values = (x.new_empty(packed.keys, config.num_key_value_heads, config.head_dim) for _ in range(2))
        turn = 1 if tokens.device.type == "cpu" else max(1, SLICE // len(x))
        for depth, layer in enumerate(self.layers):
            for buffer, prompt in zip((keys, values), packed.prompts[depth], strict=True):
                buffer.index_copy_(0, packed.prompt_places, prompt)
            norms = (layer.query_norm, layer.key_norm)
            placed(layer.heads(x), query, keys, values, packed.places, packed.cos, packed.sin, norms, config.rms_norm_eps)
            x = layer.rest(x, attend(query, keys, values, packed.spans).flatten(1))
            if depth % turn == turn - 1:
                yield None
        x = rms_norm(x, (x.shape[-1],), self.last, config.rms_norm_eps)
        yield self.give(x).float() * packed.moving

    def _time(self, times: Tensor) -> Tensor:
        """Sinusoids of 128 frequencies, through two layers: [times, hidden_size], float32."""
        steps = torch.arange(128, dtype=torch.float32, device=times.device) / 128
        angles = times.float().unsqueeze(1) * self.config.timestep_scale * torch.exp(-math.log(10_000.0) * steps)
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


Read = Callable[[str], Tensor]
"""A weight on the device, by its name in the checkpoint. Raises KeyError if there is none."""


def reader(folder: Path, device: str) -> Read:
    """Reads the weights of a checkpoint's `transformer` folder, each straight to the device."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        single = "diffusion_pytorch_model.safetensors"
        with safe_open(folder / single, "pt") as opened:
            files = dict.fromkeys(opened.keys(), single)
    handles = {name: safe_open(folder / name, "pt", device=device) for name in set(files.values())}
    return lambda name: handles[files[name]].get_tensor(name)


def towers(config: Config, read: Read | None, device: str = "cpu", dtype: Any = torch.float32) -> tuple[Understanding, Generation]:
    """Both towers. Without `read` their weights are random ones, of a spread that keeps numbers in range."""
    made = Understanding(config, device="meta", dtype=dtype), Generation(config, device="meta", dtype=dtype)
    for tower, kind in zip(made, _NAMES, strict=True):
        weights = {}
        for name, parameter in tower.named_parameters():
            if read is None:
                spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.0
                weights[name] = torch.empty_like(parameter, device=device).normal_(0.0 if parameter.ndim > 1 else 1.0, spread)
            else:
                parts = [read(each) for each in _sources(config, kind, name)]
                weights[name] = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(parameter.dtype)
        tower.load_state_dict(weights, assign=True)
        tower.requires_grad_(False)
    return made
