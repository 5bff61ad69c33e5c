"""How many steps vLLM gathers tokens before it makes outputs of them.

An output costs about as much as everything else that Python does for a token, and what leaves a stage costs more, the less is woken
at once. So a request gives at most about EACH chunks a second, more than a screen can show, and an engine at most about CHUNKS, as
long as no token waits more than about LONGEST; chunks that are due leave together. Below that every token is a chunk of its own. The
first token of a request never waits, nor does its end.
"""

from __future__ import annotations

import time
from typing import Any

EACH, CHUNKS, LONGEST = 100, 1_000, 0.12
_HOLD = 1 << 30
"""A stream interval that is never reached."""
_KEEP = 0.9
"""How much of the measured length of a step is that of the steps before."""


class Pace:
    """Sets the stream interval of an engine's requests before each step. `least` is the interval that was configured."""

    def __init__(self, processor: Any, least: int) -> None:
        self._processor = processor
        self._least = self._every = least
        self._steps = 0
        self._interval = least
        self._behind = False
        self._last = 0.0
        self._length = 0.0

    def before(self) -> None:
        """A step begins."""
        wanted = 1
        if self._every > 1:
            self._steps += 1
            wanted = _HOLD if self._steps % self._every else 2
        if wanted != self._interval or self._behind:
            self._set(wanted)

    def after(self, began: float, requests: int) -> None:
        """The step has ended that began at `began` (monotonic seconds) with so many requests."""
        now = time.monotonic()
        length = now - (self._last if 0 < began - self._last < 0.01 else began)  # what happens between two steps counts
        self._length = _KEEP * self._length + (1 - _KEEP) * length if self._length else length
        self._last = now
        every, rate = self._least, 1 / self._length
        while (rate > EACH * every or rate * requests > CHUNKS * every) and 2 * every < LONGEST * rate:
            every *= 2
        self._every = every

    def _set(self, wanted: int) -> None:
        """vLLM takes a request with interval 1 to have nothing unsent, and does not count what it has sent."""
        self._interval = self._processor.stream_interval = wanted
        self._behind = False
        for state in self._processor.request_states.values():
            if state.detokenizer is None:
                continue
            made = state.detokenizer.num_output_tokens()
            if state.stream_interval == 1:
                state.sent_tokens_offset = made
            behind = wanted == 1 and state.sent_tokens_offset < made
            state.stream_interval = 2 if behind else wanted
            self._behind |= behind
