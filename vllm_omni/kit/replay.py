"""Forwards that are launched as a whole where the device can: recorded once for each shape, and then replayed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from vllm_omni.platform import platform

AFTER = 2
"""Calls of a shape before it is recorded: what comes once is not worth it."""
SHAPES = 32
"""Recordings that are kept; the least recently used one goes."""


class Replays:
    """The recordings of one forward, whose tensors stay where they are. `device` is the platform's name."""

    def __init__(self, device: str) -> None:
        self._platform = platform(device)
        self._seen: Counter[Hashable] = Counter()
        self._kept: OrderedDict[Hashable, tuple[Callable[[], None], Any]] = OrderedDict()

    def __call__(self, shape: Hashable, call: Callable[[], Any]) -> Any:
        """What `call` gives. It launches the same for the same `shape`; what it gives is overwritten by the next call of that shape."""
        if shape in self._kept:
            self._kept.move_to_end(shape)
            replay, made = self._kept[shape]
            replay()
            return made
        self._seen[shape] += 1
        if self._seen[shape] <= AFTER or (recorded := self._platform.record(call)) is None:
            return call()
        self._kept[shape] = recorded
        if len(self._kept) > SHAPES:
            self._seen.pop(self._kept.popitem(last=False)[0])
        return self(shape, call)


def bucket(count: int, least: int = 64) -> int:
    """The size to record for so many: at most a sixteenth above, and a multiple of `least`."""
    step = max(least, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step
