"""Which device this machine has, and how that was found out.

Standard library only, because setup.py runs it before anything is installed. It reads the environment and files; it imports no
torch, runs no tool and loads no driver.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DEVICES = ("cpu", "cuda", "null")
VARIABLE = "VLLM_OMNI_TARGET_DEVICE"


class Probe(NamedTuple):
    """One source that was asked. `device` is its verdict, None if it had none; `found` says what it saw."""

    source: str
    device: str | None
    found: str


class Detected(NamedTuple):
    """The winner, why it won, and every probe in the order it was asked."""

    device: str
    reason: str
    probes: tuple[Probe, ...]


def detect(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Detected:
    """The device to build for: the variable's, else that of a visible accelerator driver, else the CPU.

    `root` is where /proc and /dev are looked for. Raises ValueError if the variable names no device.
    """
    probes = (_variable(environ), _nvidia(root), Probe("fallback", "cpu", "every machine has a CPU"))
    winner = next(probe for probe in probes if probe.device)
    return Detected(str(winner.device), f"{winner.source}: {winner.found}", probes)


def _variable(environ: Mapping[str, str]) -> Probe:
    value = environ.get(VARIABLE, "").strip()
    if not value:
        return Probe(VARIABLE, None, "not set")
    if value not in DEVICES:
        near = difflib.get_close_matches(value.lower(), DEVICES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"{VARIABLE} is '{value}', which is no device; it can be {', '.join(DEVICES)}.{hint}")
    return Probe(VARIABLE, value, f"is '{value}'")


def _nvidia(root: Path) -> Probe:
    driver, nodes = root / "proc/driver/nvidia/version", sorted((root / "dev").glob("nvidia[0-9]*"))
    if not driver.is_file():
        return Probe("NVIDIA driver", None, f"no file {driver}")
    if not nodes:
        return Probe("NVIDIA driver", None, f"{driver} exists, but no device file {root / 'dev/nvidia*'} does")
    return Probe("NVIDIA driver", "cuda", f"{driver} and {len(nodes)} device file{'s' if len(nodes) > 1 else ''}")
