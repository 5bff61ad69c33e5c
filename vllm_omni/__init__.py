"""vllm-omni: omni-modality models on an existing, unmodified vLLM. Importing this loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.32.0"
__all__ = ["AsyncOmni", "Omni", "__version__"]

if TYPE_CHECKING:
    from vllm_omni.omni import AsyncOmni, Omni


def __getattr__(name: str) -> Any:
    if name in ("Omni", "AsyncOmni"):
        from vllm_omni import omni

        return getattr(omni, name)
    raise AttributeError(f"module 'vllm_omni' has no attribute '{name}'")
