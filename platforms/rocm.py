"""AMD GPUs. Untested on hardware."""

from __future__ import annotations

from .numbered import Numbered


class Rocm(Numbered):
    """Devices are numbered as HIP numbers them."""

    variable = "HIP_VISIBLE_DEVICES"
    driver = "AMD driver"
