"""Feeds a model's hooks on vLLM's V2 runner, which asks a model for the class of its state."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_omni.compat.step import Slots, Step


class HookedState(DefaultModelState):  # type: ignore[misc,unused-ignore]
    """The state of a `kit.ar_model.HookedModel`."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._slots: Slots = model.slots
        self.now: Step | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        self._slots.add(new_req_data.req_id, req_index, new_req_data)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self._slots.remove(req_id)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        inputs = super().prepare_inputs(input_batch, req_states)
        self.now = None
        if all(name in self._slots for name in input_batch.req_ids):  # not so in vLLM's own dummy runs
            count, bounds = input_batch.num_reqs, input_batch.query_start_loc_np
            computed = input_batch.num_computed_tokens_np[:count]
            self.now = self._slots.step(input_batch.req_ids, bounds[:count], bounds[1 : count + 1], computed)
            self.model.before_forward(self.now, input_batch.input_ids)
        return inputs

    def custom_sampler(self, sampler: Any) -> Any:
        return _Sampler(sampler, self), None


class _Sampler:
    """vLLM's sampler, followed by the model's hook."""

    def __init__(self, sampler: Any, state: HookedState) -> None:
        self._sampler, self._state = sampler, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Any, input_batch: Any) -> Any:
        output = self._sampler(logits, input_batch)
        if self._state.now is not None:
            self._state.model.after_sample(self._state.now, output.sampled_token_ids[:, 0])
        return output
