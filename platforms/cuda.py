"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Cuda:
    """Devices are numbered as the driver's tools number them, by bus."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {**order, "CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in devices)} if devices else order
