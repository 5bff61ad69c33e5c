"""What a device family can do, asked by capability. The families are in `platforms/`, reached by entry point; none is named here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from importlib_metadata import entry_points

from vllm_omni.errors import SettingError, did_you_mean

GROUP = "vllm_omni.platforms"


class Platform(Protocol):
    """A device family."""

    driver: str
    """What detection calls its driver; "" if it needs none."""
    tested: bool
    """Whether anybody has run this project on one."""
    kernels: Mapping[str, str]
    """Distributions with compiled kernels for it that are used where they are installed, and the module of each."""

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        """Environment variables that make a stage's process see these devices and no others; none given means all of them.

        Raises SettingError if the family has no numbered devices.
        """
        ...

    def attention(self, dtype: Any, head_dim: int) -> tuple[Any, str]:
        """Its best `vllm_omni.kit.attention.Attention` for such tensors, or None for torch's, and why. Loads torch."""
        ...

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any] | None:
        """Make `call`, and record what it launches: what launches all of it again at once, and the tensors that this fills anew.

        The call must read and write the same memory each time, and wait for nothing. None if this family cannot.
        """
        ...

    def faults(self, torch: Mapping[str, str], drivers: Mapping[str, str]) -> Iterable[str]:
        """Sentences about what keeps this torch (what its version.py says; {} if there is none) from running on such a device here.

        `drivers`: what was found of each, by name.
        """
        ...


def platform(name: str) -> Platform:
    """The installed platform of that name. Raises SettingError."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise SettingError(f"There is no device '{name}'.{did_you_mean(name, found)}", param="device")
    return cast("Platform", found[name].load()())
