"""What is wrong with this environment, why it matters, and what repairs it.

`checks` has what is looked at, `repair` what is done about it. Nothing heavy is imported in this process.
"""

from __future__ import annotations

from vllm_omni.doctor.checks import Finding, examine, glance, own, require_vllm
from vllm_omni.doctor.repair import Repairs

__all__ = ["Finding", "Repairs", "examine", "glance", "own", "require_vllm"]
