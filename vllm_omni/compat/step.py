"""A step of the engine as a model's hooks see it, whichever of vLLM's runners runs it. `kit/ar_model.py` has the hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REQUEST = "omni_request"
"""The key of `SamplingParams.extra_args` that carries a request's id to the model: vLLM gives it another one of its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of a step, in the order of its batch. All lists have one item for each of them.

    Row `i` of the flat batch belongs to request `k` if `starts[k] <= i < ends[k]`; `computed` tokens of it were in the KV cache before.
    A request keeps its slot while it runs; one that was preempted may come back in another. Its rows come again then, from the first:
    `seen` of them, counted from the beginning of the request, were in a step before.
    """

    requests: list[str]
    slots: list[int]
    starts: list[int]
    ends: list[int]
    computed: list[int]
    seen: list[int]

    @property
    def rows(self) -> int:
        """How many rows the batch has, padding left out."""
        return self.ends[-1] if self.ends else 0


class Slots:
    """The requests that the model knows, by vLLM's ids: those that came by `InProcessEngine.add`, and not vLLM's own warm-ups."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[str, tuple[str, int, int]] = {}
        self._seen: dict[str, int] = {}
        self._ending: set[str] = set()

    def __contains__(self, internal: str) -> bool:
        return internal in self._known

    def add(self, internal: str, slot: int, data: Any) -> None:
        """A request that has come, or come back. `data` is vLLM's NewRequestData."""
        name = (getattr(data.sampling_params, "extra_args", None) or {}).get(REQUEST)
        if name is not None:
            length = getattr(data, "prompt_len", None) or len(data.prompt_token_ids)  # 0.26 does not say
            self._known[internal] = (name, slot, length)
            self._seen.setdefault(name, 0)
            self._model.joined(name, slot, length)

    def remove(self, internal: str) -> int | None:
        """A request that has ended or was preempted; the slot that is free now."""
        name, slot, _ = self._known.pop(internal, ("", None, 0))
        if slot is not None:
            self._model.left(name, slot)
            if name in self._ending:
                self._end(name)
        return slot

    def restart(self, internal: str) -> None:
        """A request that was preempted has come back to the slot it had."""
        name, slot, length = self._known[internal]
        self._model.left(name, slot)
        self._model.joined(name, slot, length)

    def end(self, names: list[str]) -> None:
        """These requests will not come back. vLLM takes one that runs out of its batch with the next step, and tells of no others."""
        running = {name for name, _, _ in self._known.values()} if names else set()
        for name in names:
            if name in running:
                self._ending.add(name)
            else:
                self._end(name)

    def _end(self, name: str) -> None:
        self._ending.discard(name)
        if self._seen.pop(name, None) is not None:
            self._model.ended(name)

    def step(self, internal: list[str], starts: Any, ends: Any, computed: Any) -> Step:
        """The step of a batch whose requests are all known."""
        known = [self._known[each] for each in internal]
        names, slots = [name for name, _, _ in known], [slot for _, slot, _ in known]
        step = Step(names, slots, starts.tolist(), ends.tolist(), computed.tolist(), [self._seen[name] for name in names])
        for name, start, end, before in zip(names, step.starts, step.ends, step.computed, strict=True):
            self._seen[name] = max(self._seen[name], before + end - start)
        return step
