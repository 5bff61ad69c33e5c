"""Attention over packed sequences of any lengths, by the best means there is for the device.

`choose` asks installed distributions first (the hook `vllm_omni_attention`), and logs once what it took and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_omni import hookspecs
from vllm_omni.hookspecs import hookimpl
from vllm_omni.platform import platform

log = logging.getLogger("vllm_omni.attention")

Attention = Callable[[Any, Any, Any, "Spans"], Any]
"""Of queries [queries, heads, head_dim], keys and values [keys, fewer heads, head_dim], and the Spans that say which belong together: what
is attended to, [queries, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Spans:
    """How long sequences are that lie one behind the other: each one's queries see each one's own keys, all of them.

    `query_ends` and `key_ends` are int32 on the device, [sequences + 1], and begin with 0. The counts may be larger than the lengths are.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_ends: Any
    key_ends: Any
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: Any) -> Spans:
        ends, key_ends = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device) for lengths in (queries, keys))
        return cls(tuple(queries), tuple(keys), ends, key_ends, max(queries), max(keys))


@cache
def choose(device: str, dtype: Any, head_dim: int) -> Attention:
    """The attention to use for tensors of this kind. `device` is the platform's name."""
    manager = hookspecs.plugins()
    manager.register(_Known(), name="vllm-omni")
    found: Attention = manager.hook.vllm_omni_attention(device=device, dtype=dtype, head_dim=head_dim)
    return found


class _Known:
    """What the device's platform knows, or else torch."""

    @hookimpl(trylast=True)
    def vllm_omni_attention(self, device: str, dtype: Any, head_dim: int) -> Attention:
        found, why = platform(device).attention(dtype, head_dim)
        log.info("Attention on %s, %s, heads of %d: %s.", device, dtype, head_dim, why if found else f"torch's, as {why}")
        return found or by_torch


def by_torch(query: Any, keys: Any, values: Any, spans: Spans) -> Any:
    """By torch's scaled_dot_product_attention, sequence by sequence: the reference for the others."""
    found = torch.empty_like(query)
    begin = start = 0
    for many, seen in zip(spans.queries, spans.keys, strict=True):
        parts = (query[begin : begin + many], keys[start : start + seen], values[start : start + seen])
        own, known, seen_values = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        made = scaled_dot_product_attention(own, known, seen_values, enable_gqa=True)
        found[begin : begin + many] = made.squeeze(0).transpose(0, 1)
        begin, start = begin + many, start + seen
    return found
