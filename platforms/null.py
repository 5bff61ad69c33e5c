"""A device that computes nothing and exists everywhere: placement can be tested without hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class Null:
    """Has as many numbered devices as a recipe names."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"VLLM_OMNI_NULL_DEVICES": ",".join(str(device) for device in devices)} if devices else {}

    def faults(self, torch: str, drivers: Mapping[str, str]) -> Iterable[str]:
        return ()
