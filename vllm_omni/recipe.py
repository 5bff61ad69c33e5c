"""Where and how a graph runs on one kind of machine, settled: every value is final and knows where it came from.

Reading and merging the layers is `settle.py`'s work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_WINDOW = 32 << 20
"""Bytes a request may have in flight on one edge before its producer waits."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one stage runs. `args` are declared by the stage and its engine; `vllm` goes to vLLM unread."""

    devices: tuple[int, ...] = ()
    replicas: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)
    vllm: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """How one edge moves payloads. `auto` is `inline` inside a process and `shm` between processes; `window` is in bytes."""

    connector: str = "auto"
    window: int = DEFAULT_WINDOW


@dataclass(frozen=True, slots=True)
class Recipe:
    """A settled recipe. `sources` maps each dotted setting (`stages.talker.replicas`) to the layer that set it."""

    graph: str
    device: str = "cpu"
    stages: Mapping[str, Placement] = field(default_factory=dict)
    edges: Mapping[str, Link] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
