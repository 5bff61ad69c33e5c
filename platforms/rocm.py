"""AMD GPUs. Untested on hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Rocm:
    """Devices are numbered as HIP numbers them."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"HIP_VISIBLE_DEVICES": ",".join(str(device) for device in devices)} if devices else {}
