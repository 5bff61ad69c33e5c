"""Layers whose weights stay in the host's memory, each copied to the device while the one before it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Streamed:
    """The `layers`, alike in shape, of which the device holds two at a time. They are best used in turn, over and over.

    Their parameters must be on the host; after `use` those of that layer are on the device, until the next but one is used.
    """

    def __init__(self, layers: Sequence[Any], device: str) -> None:
        self._layers = layers
        self._aside = device != "cpu"  # there a copy can run beside the computation
        self._weights = [[self._pinned(weight) for weight in layer.parameters()] for layer in layers]
        self._places = [[torch.empty_like(weight, device=device) for weight in self._weights[0]] for _ in range(2)]
        self._holds: list[int | None] = [None, None]
        self._ready: list[Any] = [None, None]
        self._stream = torch.Stream(device) if self._aside else None
        self._last = 1

    def use(self, depth: int) -> Any:
        """That layer, with its weights on the device; the next one's are on their way."""
        if depth not in self._holds:
            self._fetch(depth, 1 - self._last)
        place = self._last = self._holds.index(depth)
        if self._ready[place] is not None:
            torch.accelerator.current_stream().wait_event(self._ready[place])
        for parameter, weight in zip(self._layers[depth].parameters(), self._places[place], strict=True):
            parameter.data = weight
        following = (depth + 1) % len(self._layers)
        if following not in self._holds:
            self._fetch(following, 1 - place)
        return self._layers[depth]

    def _fetch(self, depth: int, place: int) -> None:
        """Copy a layer's weights, after all that was asked of the device so far: it may use what was there before."""
        self._holds[place] = depth
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
            with self._stream:
                self._copy(depth, place)
            self._ready[place] = self._stream.record_event()
        else:
            self._copy(depth, place)

    def _copy(self, depth: int, place: int) -> None:
        for target, weight in zip(self._places[place], self._weights[depth], strict=True):
            target.copy_(weight, non_blocking=True)

    def _pinned(self, weight: Any) -> Any:
        return weight.data.pin_memory() if self._aside else weight.data
