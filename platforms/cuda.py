"""NVIDIA GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .numbered import Numbered

DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each CUDA: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility"."""


class Cuda(Numbered):
    """Devices are numbered as the driver's tools number them, by bus."""

    variable = "CUDA_VISIBLE_DEVICES"

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **super().visible_devices_env(devices)}

    def faults(self, torch: str, drivers: Mapping[str, str]) -> Iterable[str]:
        have, built = re.search(r"\((\d+)[\d.]*\)", drivers.get("NVIDIA driver", "")), re.search(r"\+cu(\d\d)", torch)
        oldest = DRIVERS.get(int(built[1]), 0) if built else 0
        if have and int(have[1]) < oldest:
            needed = f"torch {torch} needs an NVIDIA driver of {oldest} or later, and {have[1]} is here"
            yield f"{needed}: update it, or install a torch for an older CUDA."
