"""Steps of a transformer layer that are one pass over memory on a GPU, in Triton; elsewhere the same in torch.

Both compute in float32 and round once. The tests compare them (on a CPU by Triton's interpreter).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

try:
    import triton
    from triton import language as tl
except ImportError:  # a torch without GPUs comes without it
    triton = None


def gated(wide: Any, fused: bool | None = None) -> Any:
    """`silu(gate) * up` of [tokens, 2 * width], the gate first: [tokens, width]."""
    width = wide.shape[1] // 2
    if not _fused(wide, fused):
        return silu(wide[:, :width]) * wide[:, width:]
    made = wide.new_empty(wide.shape[0], width)
    _gated[(wide.shape[0], triton.cdiv(width, 1024))](wide, made, width, BLOCK=1024)
    return made


def placed(
    heads: Any, query: Any, keys: Any, values: Any, places: Any, cos: Any, sin: Any, norms: tuple[Any, Any], eps: float,
    fused: bool | None = None,
) -> None:  # fmt: skip
    """Queries, keys and values out of one product, where attention looks for them.

    `heads` [tokens, query heads + 2 * kv heads, head_dim] goes to `query` [tokens, query heads, head_dim] and, at the rows `places` (int32
    [tokens]), to `keys` and `values` [rows, kv heads, head_dim]. Queries and keys are normed (RMS, by the weights `norms`; None: not) and
    turned by `cos` and `sin` [tokens, head_dim / 2], float32: the first half of a head with the second.
    """
    many, kept, wide = query.shape[1], keys.shape[1], query.shape[2]
    if _fused(heads, fused):
        _placed[(heads.shape[0],)](
            heads, query, keys, values, places, cos, sin, *(heads if norm is None else norm for norm in norms), eps, MANY=many, KEPT=kept,
            HALF=wide // 2, NORMED=norms[0] is not None, ROWS=triton.next_power_of_2(many), FEW=triton.next_power_of_2(kept),
        )  # fmt: skip
        return
    own_query, own_keys, own_values = heads.split((many, kept, kept), dim=1)
    cos, sin = (each.unsqueeze(1) for each in (cos, sin))
    query.copy_(turned(_normed(own_query, norms[0], eps), cos, sin))
    keys.index_copy_(0, places.long(), turned(_normed(own_keys, norms[1], eps), cos, sin).to(keys.dtype))
    values.index_copy_(0, places.long(), own_values)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Heads [tokens, heads, head_dim] turned by angles [tokens, 1, head_dim / 2]: in float32, and back in their own type."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _normed(x: Any, weight: Any, eps: float) -> Any:
    return x if weight is None else rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)


def _fused(x: Any, fused: bool | None) -> bool:
    return (x.device.type != "cpu" and triton is not None) if fused is None else fused


if triton is not None:

    @triton.jit
    def _gated(wide, made, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        gate = tl.load(wide + token * 2 * width + at, mask=inside).to(tl.float32)
        up = tl.load(wide + token * 2 * width + width + at, mask=inside).to(tl.float32)
        tl.store(made + token * width + at, gate * tl.sigmoid(gate) * up, mask=inside)

    @triton.jit
    def _turned(  # type: ignore[no-untyped-def] # noqa: ANN202
        source, norm, target, c, s, eps, at, inside, pair, HALF: tl.constexpr, NORMED: tl.constexpr,  # noqa: ANN001
    ):  # fmt: skip
        """Some heads of one token: `at` [heads, half] is where their first halves lie, `pair` [1, half] are numbers in a head."""
        first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            first = first * scale * tl.load(norm + pair).to(tl.float32)
            second = second * scale * tl.load(norm + HALF + pair).to(tl.float32)
        tl.store(target + at, first * c - second * s, mask=inside)
        tl.store(target + HALF + at, second * c + first * s, mask=inside)

    @triton.jit
    def _placed(  # type: ignore[no-untyped-def] # noqa: ANN202
        heads, query, keys, values, places, cos, sin, query_norm, key_norm, eps,  # noqa: ANN001
        MANY: tl.constexpr, KEPT: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        pair = tl.arange(0, HALF)[None, :]
        c, s = tl.load(cos + token * HALF + pair), tl.load(sin + token * HALF + pair)
        row, few = tl.arange(0, ROWS)[:, None], tl.arange(0, FEW)[:, None]
        every, some = row * 2 * HALF + pair, few * 2 * HALF + pair
        is_many, is_few = (row < MANY) & (pair >= 0), (few < KEPT) & (pair >= 0)
        source = heads + token * (MANY + 2 * KEPT) * 2 * HALF
        _turned(source, query_norm, query + token * MANY * 2 * HALF, c, s, eps, every, is_many, pair, HALF, NORMED)
        place = tl.load(places + token).to(tl.int64) * KEPT * 2 * HALF
        _turned(source + MANY * 2 * HALF, key_norm, keys + place, c, s, eps, some, is_few, pair, HALF, NORMED)
        source += (MANY + KEPT) * 2 * HALF
        tl.store(values + place + some, tl.load(source + some, mask=is_few), mask=is_few)
        tl.store(values + place + HALF + some, tl.load(source + HALF + some, mask=is_few), mask=is_few)
