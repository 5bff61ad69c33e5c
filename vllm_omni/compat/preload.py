"""What a stage on vLLM imports, so that the forkserver has it once for all of them. Starts no thread and builds nothing."""

from __future__ import annotations

import importlib
import os
import warnings

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the stage's process; vLLM has no other switch for that
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about its own defaults; a user who wants them sets this
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
warnings.filterwarnings("ignore", module="vllm")

for name in ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.v1.sample.sampler"):
    importlib.import_module(name)
