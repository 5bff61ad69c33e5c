"""Moore Threads GPUs. Untested on hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class Musa:
    """Devices are numbered as the driver's tools number them."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"MUSA_VISIBLE_DEVICES": ",".join(str(device) for device in devices)} if devices else {}

    def faults(self, torch: str, drivers: Mapping[str, str]) -> Iterable[str]:
        return ()
