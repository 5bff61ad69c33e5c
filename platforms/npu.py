"""Ascend NPUs. Untested on hardware."""

from __future__ import annotations

from .numbered import Numbered


class Npu(Numbered):
    """Devices are numbered as the driver's tools number them."""

    variable = "ASCEND_RT_VISIBLE_DEVICES"
    driver = "Ascend driver"
