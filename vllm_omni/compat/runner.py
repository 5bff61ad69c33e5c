"""Feeds a model's hooks on vLLM's V1 runner, which CPUs without Triton have.

The methods that are overridden here have kept their signatures since vLLM 0.20.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.compat.step import Slots, Step

WORKERS = {"vllm.v1.worker.cpu_worker.CPUWorker": "vllm_omni.compat.runner.HookedWorker"}
"""vLLM's workers with a V1 runner, and ours in their place. Where there is none, a hooked model needs the V2 runner."""


class HookedRunner(CPUModelRunner):  # type: ignore[misc,unused-ignore]
    """vLLM's V1 runner for a `kit.ar_model.HookedModel`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._omni_slots: Slots = self.get_model().slots
        self._omni_free = list(range(2 * self.max_num_reqs))[::-1]  # a preempted request keeps its slot, and another has its place
        self._omni_step: Step | None = None

    def _update_states(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            slot = self._omni_slots.remove(name)
            if slot is not None:
                self._omni_free.append(slot)
        for name in getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ()):
            if name in self._omni_slots:
                self._omni_slots.restart(name)
        result = super()._update_states(scheduler_output)
        for data in scheduler_output.scheduled_new_reqs:
            if data.req_id not in self._omni_slots:
                self._omni_slots.add(data.req_id, self._omni_free[-1], data)
                if data.req_id in self._omni_slots:
                    self._omni_free.pop()
        return result

    def _preprocess(self, scheduler_output: Any, num_input_tokens: int, *args: Any, **kwargs: Any) -> Any:
        inputs = super()._preprocess(scheduler_output, num_input_tokens, *args, **kwargs)
        names, count, bounds = list(self.input_batch.req_ids), self.input_batch.num_reqs, self.query_start_loc.np
        self._omni_step = None
        if all(name in self._omni_slots for name in names):
            computed = self.input_batch.num_computed_tokens_cpu[:count]
            self._omni_step = self._omni_slots.step(names, bounds[:count], bounds[1 : count + 1], computed)
            self.get_model().before_forward(self._omni_step, self.input_ids.gpu[:num_input_tokens])
        return inputs

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        output = super()._sample(logits, spec_decode_metadata)
        if self._omni_step is not None:
            self.get_model().after_sample(self._omni_step, output.sampled_token_ids[:, 0])
        return output


class HookedWorker(CPUWorker):  # type: ignore[misc,unused-ignore]
    """vLLM's CPU worker with that runner."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = HookedRunner(self.vllm_config, torch.device("cpu"))
