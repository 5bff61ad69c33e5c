"""Intel GPUs. Untested on hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class Xpu:
    """Devices are numbered as Level Zero numbers them."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"ZE_AFFINITY_MASK": ",".join(str(device) for device in devices)} if devices else {}

    def faults(self, torch: str, drivers: Mapping[str, str]) -> Iterable[str]:
        return ()
