"""What a plugin's tests inherit. Needs pytest; nothing that serves requests imports it."""

import pytest

pytest.register_assert_rewrite("vllm_omni.testing.chunks", "vllm_omni.testing.contract")

from vllm_omni.testing.contract import PluginContract, claim  # noqa: E402  (asserts are rewritten only in what is imported later)

__all__ = ["PluginContract", "claim"]
