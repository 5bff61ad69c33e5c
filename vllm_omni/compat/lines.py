"""The lines of vLLM (0.32, say) that this core works with, and what is said to one that has another. Imports no vLLM."""

from __future__ import annotations

import shlex
from contextlib import suppress
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from vllm_omni.discovery import version_of
from vllm_omni.machine import detected

LINES = ((0, 26), (0, 28), (0, 30), (0, 32))
"""The supported lines, oldest first. Those between them are odd ones: nobody tested them."""

OLDEST, *_, NEWEST = TESTED = tuple(f"{major}.{minor}" for major, minor in LINES)

SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's own server, run as a program: the command `vllm` needs a distribution of that name, which some builds lack."""


KERNELS = "vllm._C"
"""The module of its compiled operators, in every build that has some."""

PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
"""The entry points of its own plugins; the variable PLUGINS names those that are loaded, if it is set (docs.vllm.ai, "Plugin System")."""
PLUGINS = "VLLM_PLUGINS"


class Standing(Enum):
    """How this core stands to a version of vLLM. UNKNOWN: a build from source without tags, which tells no line."""

    TESTED, UNTESTED, UNSUPPORTED, UNKNOWN = range(4)


def standing(version: str) -> Standing:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return Standing.UNKNOWN
    line = parsed.release[:2]
    if line == (0, 1) and parsed.is_devrelease:
        return Standing.UNKNOWN
    if not LINES[0] <= line <= LINES[-1]:
        return Standing.UNSUPPORTED
    return Standing.TESTED if line in LINES else Standing.UNTESTED


def supported(name: str, instead: str, torch: str) -> str:
    """The supported lines of a distribution of vLLM, as a requirement: such as take `torch`, and not that of the version `instead`."""
    every = f"{name}>={OLDEST},<{LINES[-1][0]}.{LINES[-1][1] + 1}"
    line = ".".join(map(str, Version(instead).release[:2]))
    return f"{_fitting(every, torch)},!={line}.*"


class Wanted(NamedTuple):
    """The vLLM that a device's requirements name ("" if they name none), and the options with which an installer finds it."""

    requirement: str
    options: tuple[str, ...]


def wanted(device: str, torch: str = "") -> Wanted:
    """`torch`: the version of the one to keep. If no supported line takes it, they are all wanted."""
    from vllm_omni_platforms import stack  # type: ignore[import-not-found,unused-ignore]

    folder = Path(str(files("vllm_omni_platforms")))
    named = next(iter(stack.requirements(folder, device)), "")
    return Wanted(_fitting(named, torch) if named else "", tuple(stack.options(folder, device)))


def _fitting(requirement: str, torch: str) -> str:
    from vllm_omni_platforms.stack import fitting  # type: ignore[import-not-found,unused-ignore]

    with suppress(ValueError):
        return str(fitting(requirement, torch)) if torch else requirement
    return requirement


def install() -> str:
    """A sentence with the command that installs vLLM on this machine."""
    device = detected().device
    named, options = wanted(device, version_of("torch"))
    if not named:
        return f"README.md, 'Install', says where one for {device} is."
    return f"Install it with: {shlex.join(['pip', 'install', *options, named])}"
