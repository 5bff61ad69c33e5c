"""Echo keeps the contract of every plugin."""

from __future__ import annotations

from vllm_omni.testing import PluginContract


class TestContract(PluginContract):
    model = "echo"
