"""A device that computes nothing and exists everywhere: placement can be tested without hardware."""

from __future__ import annotations

from .numbered import Numbered


class Null(Numbered):
    """Has as many numbered devices as a recipe names."""

    variable = "VLLM_OMNI_NULL_DEVICES"
    driver = ""
    tested = True
