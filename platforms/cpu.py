"""The host processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vllm_omni.errors import SettingError


class Cpu:
    """Stages share the machine's cores; there is nothing to number."""

    driver = ""
    tested = True
    kernels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
        self._cpuinfo = cpuinfo

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        if devices:
            numbers = ", ".join(str(device) for device in devices)
            raise SettingError(f"The CPU has no device {numbers}; leave `devices` out of the recipe.", param="devices")
        return {}

    def attention(self, dtype: Any, head_dim: int) -> tuple[Any, str]:
        return None, "this is a CPU"

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any] | None:
        return None

    def faults(self, torch: Mapping[str, str], drivers: Mapping[str, str]) -> Iterable[str]:
        """vLLM's builds for it need AVX2: docs.vllm.ai, "Installation", "CPU"."""
        lines = self._cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if self._cpuinfo.is_file() else []
        flags = next((line for line in lines if line.startswith("flags")), "")
        if flags and not {"avx2", "avx512f"} & set(flags.split()):
            yield "This processor has neither AVX2 nor AVX-512: vLLM's build for it ends with an illegal instruction."
