"""AMD GPUs. Untested on hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class Rocm:
    """Devices are numbered as HIP numbers them."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"HIP_VISIBLE_DEVICES": ",".join(str(device) for device in devices)} if devices else {}

    def faults(self, torch: str, drivers: Mapping[str, str]) -> Iterable[str]:
        return ()
