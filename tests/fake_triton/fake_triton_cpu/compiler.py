"""A backend of Triton that compiles nothing: its kernels are interpreted."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class CPUInterpBackend(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-interp"

    def parse_options(self, options: Any) -> Any:
        return options

    def add_stages(self, stages: Any, options: Any, language: Any) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
