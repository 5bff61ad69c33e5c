"""What a stage on vLLM imports, so that the forkserver has it once for all of them. Starts no thread and builds nothing.

It sets, before vLLM and torch read it, what of the environment vLLM has no argument for. What a user has set stays.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path


def _threads() -> int:
    """As many threads as vLLM's own workers on a CPU take: one for each core but one, which is left to the other processes."""
    smt = Path("/sys/devices/system/cpu/smt/active")
    cores = len(os.sched_getaffinity(0)) // (2 if smt.is_file() and smt.read_text().strip() == "1" else 1)
    return max(1, cores - 1)


os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the stage's process
for variable, value in {
    "OMP_NUM_THREADS": str(_threads()),
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait for others must not keep the cores from other stages
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about its own defaults
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(variable, value)
warnings.filterwarnings("ignore", module="vllm")

MODULES = ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.v1.sample.sampler")
HOST = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.model_loader")
"""More where the worker is one for the host's processor. What accelerators need is left to the stage: it might open the device."""

for name in MODULES:
    importlib.import_module(name)
if importlib.import_module("vllm.platforms").current_platform.device_type == "cpu":
    for name in HOST:
        importlib.import_module(name)
