"""Moore Threads GPUs. Untested on hardware."""

from __future__ import annotations

from .numbered import Numbered


class Musa(Numbered):
    """Devices are numbered as the driver's tools number them."""

    variable = "MUSA_VISIBLE_DEVICES"
    driver = "Moore Threads driver"
