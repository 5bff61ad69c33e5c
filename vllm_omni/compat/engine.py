"""vLLM's engine in the calling process: scheduler, first worker and detokenizer, without vLLM's own processes.

One thread starts it and steps it; `sampling` may be called in another. It knows nothing of stages and payloads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, exceptions
from vllm.sampling_params import RequestOutputKind

from vllm_omni.errors import RequestError, SettingError, did_you_mean

REFUSALS = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
"""What vLLM raises for a request that it does not take: the second since 0.28."""
QUIET = {"disable_log_stats": True}
"""Engine arguments where nobody says otherwise: the counts that vLLM would log are never shown here."""


class InProcessEngine:
    """`args` are vLLM's engine arguments. Raises SettingError for one it does not have."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(EngineArgs)]
        for name in args:
            if name not in known:
                raise SettingError(f"vLLM has no engine argument '{name}'.{did_you_mean(name, known)}", param=name)
        if "model" not in args:
            raise SettingError("vLLM is not told which model to load: set its 'model'.", param="model")
        self._engine = LLMEngine.from_engine_args(EngineArgs(**{**QUIET, **args}))
        self.tokenizer = copy.deepcopy(self._engine.get_tokenizer())  # the engine's own decodes, in its thread, at the same time
        self._defaults = self._engine.model_config.get_diff_sampling_param()

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self._engine.has_unfinished_requests())

    def sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        """vLLM's sampling parameters: those given (not None), or else the checkpoint's. Raises RequestError for a value vLLM refuses."""
        given = {name: value for name, value in params.items() if value is not None}
        try:
            return SamplingParams(**{"max_tokens": None, **self._defaults, **given}, output_kind=RequestOutputKind.DELTA)
        except (TypeError, *REFUSALS) as error:
            raise _refusal(error) from error

    def add(self, request: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Queue a request; its id must be new. Raises RequestError for a prompt that does not fit."""
        try:
            self._engine.add_request(request, {"type": "token", "prompt_token_ids": list(prompt)}, sampling)
        except REFUSALS as error:
            raise _refusal(error) from error

    def abort(self, request: str) -> None:
        """Forget a request and free its blocks; nothing happens to one that has ended."""
        self._engine.abort_request([request])

    def step(self) -> list[Any]:
        """One step for whatever is scheduled; vLLM's RequestOutputs, with what is new in them."""
        return list(self._engine.step())

    def blocks_in_use(self) -> int:
        """KV-cache blocks that requests hold. Those that only remember a prefix are free."""
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one is vLLM's own placeholder

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()


def _refusal(error: Exception) -> RequestError:
    """What vLLM says of a request it does not take; its newer errors name the parameter."""
    return RequestError(f"{str(error).rstrip('.')}.", param=getattr(error, "parameter", None))
