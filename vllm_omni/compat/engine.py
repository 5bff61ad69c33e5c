"""vLLM's engine in the calling process: scheduler, first worker and detokenizer, without vLLM's own processes.

One thread starts it and steps it; `sampling` may be called in another. It knows nothing of stages and payloads.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, ModelRegistry, SamplingParams, exceptions
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext

from vllm_omni.compat.pace import Pace
from vllm_omni.compat.step import REQUEST
from vllm_omni.errors import RequestError, SettingError, did_you_mean

REFUSALS = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
"""What vLLM raises for a request that it does not take: the second since 0.28."""
MOST_ENDS = 100
"""Token ids that may end an answer: vLLM's V2 runner has room for 128, the checkpoint's own included. And texts: all are looked for at
each token of a request, while the others wait.
"""
MOST_STOPS = 10_000
"""Characters of all these texts together."""
QUIET = {"disable_log_stats": True}
"""Engine arguments where nobody says otherwise: the counts that vLLM would log are never shown here."""


class InProcessEngine:
    """`args` are vLLM's engine arguments, `model` a class to run the checkpoint with (None: the one vLLM has for it).

    Raises SettingError for an argument vLLM does not have.
    """

    def __init__(self, args: Mapping[str, Any], model: type | None = None) -> None:
        known = [field.name for field in fields(EngineArgs) if not field.name.startswith("_")]
        for name in args:
            if name not in known:
                raise SettingError(f"vLLM has no engine argument '{name}'.{did_you_mean(name, known)}", param=name)
        if "model" not in args:
            raise SettingError("vLLM is not told which model to load: set its 'model'.", param="model")
        folder = str(args["model"])
        if folder.startswith((".", "/", "~")) and not Path(folder).expanduser().exists():
            raise SettingError(f"There is no model folder {folder}.", param="model")
        self._hooked = model is not None
        given = EngineArgs(**{**QUIET, **args, **(_outside(model, args) if model is not None else {})})
        config = given.create_engine_config(UsageContext.OPENAI_API_SERVER)  # what is not said is as in vLLM's own server
        if self._hooked and not config.use_v2_model_runner:
            config.parallel_config.worker_cls = _hooked_worker(config.parallel_config.worker_cls)
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=given.disable_log_stats)
        self.tokenizer = copy.deepcopy(self._engine.get_tokenizer())  # the engine's own decodes, in its thread, at the same time
        self.context = int(self._engine.model_config.max_model_len)
        """Tokens of a prompt and its answer together."""
        self.most_characters = self.context * max(map(len, self.tokenizer.get_vocab()), default=1)
        """No longer text fits into the context: a token is at most as long as the longest one."""
        self._pace = Pace(self._engine.output_processor, config.scheduler_config.stream_interval)
        self._ended: list[str] = []
        self._defaults = self._engine.model_config.get_diff_sampling_param()

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return bool(
            self._engine.has_unfinished_requests() or (self._hooked and scheduler.has_finished_requests())
        )  # the model waits for it

    def sampling(self, params: Mapping[str, Any], request: str = "") -> SamplingParams:
        """vLLM's sampling parameters: those given (not None), or else the checkpoint's. A model with hooks knows `request` by them.

        Raises RequestError for a value vLLM refuses.
        """
        given = {name: value for name, value in params.items() if value is not None}
        longest, ends = self.context, given.get("stop_token_ids", ())
        if given.get("min_tokens", 0) > longest:
            raise RequestError(f"'min_tokens' must be at most {longest}, the length of the context.", param="min_tokens")
        if len(ends) > MOST_ENDS:
            raise RequestError(f"'stop_token_ids' has {len(ends)} items: give at most {MOST_ENDS}.", param="stop_token_ids")
        stops = given.get("stop", ())
        if len(stops) > MOST_ENDS or sum(map(len, stops)) > MOST_STOPS:
            raise RequestError(f"'stop' is too long: give at most {MOST_ENDS} texts, of {MOST_STOPS} characters together.", param="stop")
        try:
            known = {"extra_args": {REQUEST: request}} if self._hooked else {}
            return SamplingParams(**{"max_tokens": None, **self._defaults, **given, **known}, output_kind=RequestOutputKind.DELTA)
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
        self._ended.append(request)

    def step(self) -> list[Any]:
        """One step for whatever is scheduled; vLLM's RequestOutputs, with what is new in them."""
        began, requests = time.monotonic(), self._engine.get_num_unfinished_requests()
        self._pace.before()
        outputs = self._engine.step()
        self._pace.after(began, requests)
        self._ended += (output.request_id for output in outputs if output.finished)
        return list(outputs)

    def take(self) -> list[tuple[str, str, Any, dict[str, Any]]]:
        """What the model has emitted since the last time: request, kind, tensor, meta. Comes by RPC, as vLLM's outputs have no room."""
        ended, self._ended = self._ended, []
        return list(self._engine.collective_rpc("omni_take", args=(ended,))[0]) if self._hooked else []

    def blocks_in_use(self) -> int:
        """KV-cache blocks that requests hold. Those that only remember a prefix are free."""
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one is vLLM's own placeholder

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()


def _outside(model: type, args: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that make vLLM run a class it does not know, which is registered under its own name."""
    ModelRegistry.register_model(model.__name__, model)
    overrides = {**(args.get("hf_overrides") or {}), "architectures": [model.__name__]}
    return {"hf_overrides": overrides, "worker_extension_cls": "vllm_omni.compat.calls.Calls"}


def _hooked_worker(name: str) -> str:
    from vllm_omni.compat.runner import WORKERS

    if name not in WORKERS:
        raise SettingError(f"A model with hooks needs vLLM's V2 model runner beside the worker {name}: set VLLM_USE_V2_MODEL_RUNNER=1.")
    return WORKERS[name]


def _refusal(error: Exception) -> RequestError:
    """What vLLM says of a request it does not take; its newer errors name the parameter."""
    return RequestError(f"{str(error).rstrip('.')}.", param=getattr(error, "parameter", None))
