"""What most device families are: a variable holds the numbers of the devices that a process sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar


class Numbered:
    """The base of a family that needs no more said of it than the variable's name."""

    variable: ClassVar[str]
    driver: ClassVar[str]
    tested: ClassVar[bool] = False
    kernels: ClassVar[Mapping[str, str]] = {}

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {self.variable: ",".join(str(device) for device in devices)} if devices else {}

    def attention(self, dtype: Any, head_dim: int) -> tuple[Any, str]:
        return None, "no kernel for packed sequences is known for this device"

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any] | None:
        return None

    def faults(self, torch: Mapping[str, str], drivers: Mapping[str, str]) -> Iterable[str]:
        return ()
