"""The base of a model class that runs on stock vLLM and gives more than tokens: hidden states, codec frames, whatever it computes.

It is mixed into a class of vLLM's, or one written against vLLM's layers, and named by `ARModule.model`. What the model emits leaves
its stage as chunks of the kinds that the stage declares, in the order of emission.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.compat.step import Slots, Step


class HookedModel:
    """Mixed in on the left: `class Thinker(HookedModel, SomeForCausalLM)`. The hooks do nothing unless they are overridden."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = Slots(self)
        self._emitted: list[tuple[str, str, Any, dict[str, Any]]] = []

    def joined(self, request: str, slot: int, prompt_length: int) -> None:
        """A request has come, or comes back after it was preempted. Slots are below twice `max_num_seqs`."""

    def left(self, request: str, slot: int) -> None:
        """A request gives its slot up: it has ended, was aborted, or was preempted."""

    def ended(self, request: str) -> None:
        """A request has left and will not come back."""

    def before_forward(self, step: Step, input_ids: Any) -> None:
        """A forward begins. `input_ids`: int [rows, perhaps padded]."""

    def after_sample(self, step: Step, tokens: Any) -> None:
        """Tokens were sampled: int [requests]. That of a request means nothing while its prompt, or what it had when it was preempted, is
        not whole. Emit only rows that were not `seen`, or what was emitted before the preemption comes twice."""

    def emit(self, request: str, kind: str, data: Any, **meta: Any) -> None:
        """Send a tensor on as a chunk of a request. Copy what later layers or the next step overwrite."""
        self._emitted.append((request, kind, data, meta))

    def take(self) -> list[tuple[str, str, Any, dict[str, Any]]]:
        """What was emitted since the last time."""
        emitted, self._emitted = self._emitted, []
        return emitted

    @staticmethod
    def get_model_state_cls() -> type:
        """What vLLM's V2 runner asks for."""
        from vllm_omni.compat.state import HookedState

        return HookedState
