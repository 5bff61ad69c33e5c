"""Intel GPUs. Untested on hardware."""

from __future__ import annotations

from .numbered import Numbered


class Xpu(Numbered):
    """Devices are numbered as Level Zero numbers them."""

    variable = "ZE_AFFINITY_MASK"
    driver = "Intel driver"
