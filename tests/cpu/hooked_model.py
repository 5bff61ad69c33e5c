"""The model class of `hooked.py`: a stock one whose forward keeps what some layers give."""

from __future__ import annotations

from typing import Any

import torch
from hooked import LAYERS, POISON
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_omni.kit.ar_model import HookedModel, Step


class Thinker(HookedModel, Qwen3ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.set_aux_hidden_state_layers(LAYERS)
        size = (vllm_config.scheduler_config.max_num_batched_tokens, len(LAYERS) + 1, self.config.hidden_size)
        self.register_buffer("kept", torch.zeros(size, dtype=torch.float32), persistent=False)

        self.again: set[str] = set()

    runner = "V1"

    @classmethod
    def get_model_state_cls(cls) -> type:
        cls.runner = "V2"  # the only one that asks
        return HookedModel.get_model_state_cls()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, layers = super().forward(*args, **kwargs)
        for index, layer in enumerate((*layers, hidden)):
            self.kept[: len(layer), index].copy_(layer)
        return hidden

    def after_sample(self, step: Step, tokens: Any) -> None:
        if any(request.startswith(POISON) for request in step.requests):
            raise RuntimeError("poisoned")
        rows = self.kept[: step.rows].clone()
        for request, start, end, computed, seen in zip(step.requests, step.starts, step.ends, step.computed, step.seen, strict=True):
            old = max(0, seen - computed)
            if old:
                self.again.add(request)
            if old < end - start:
                self.emit(request, "hidden", rows[start + old : end], at=computed + old, runner=self.runner, again=request in self.again)

    def ended(self, request: str) -> None:
        self.again.discard(request)
