"""The host processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_omni.errors import SettingError


class Cpu:
    """Stages share the machine's cores; there is nothing to number."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        if devices:
            numbers = ", ".join(str(device) for device in devices)
            raise SettingError(f"The CPU has no device {numbers}; leave `devices` out of the recipe.", param="devices")
        return {}
