"""The lines of vLLM (0.32, say) that this core works with, and what is said to one that has another. Imports no vLLM."""

from __future__ import annotations

import logging
from enum import Enum
from importlib.resources import files
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_omni.discovery import installed_vllm
from vllm_omni.errors import SettingError
from vllm_omni.settle import detected

log = logging.getLogger("vllm_omni")

LINES = ((0, 26), (0, 28), (0, 30), (0, 32))
"""The supported lines, oldest first. Those between them are odd ones: nobody tested them."""

OLDEST, *_, NEWEST = TESTED = tuple(f"{major}.{minor}" for major, minor in LINES)

SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's own server, run as a program: the command `vllm` needs a distribution of that name, which some builds lack."""


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


def repair(name: str) -> str:
    """The command that brings a distribution of vLLM to a supported line."""
    return f"pip install '{name}>={NEWEST},<{LINES[-1][0]}.{LINES[-1][1] + 1}'"


def wanted() -> str:
    """The vLLM that the requirements of this machine's device name; "" if they name none."""
    from vllm_omni_platforms.stack import requirements  # type: ignore[import-not-found,unused-ignore]

    named: list[str] = requirements(Path(str(files("vllm_omni_platforms"))), detected().device)
    return named[0] if named else ""


def install() -> str:
    """A sentence with the command that installs vLLM on this machine."""
    named = wanted()
    return f"Install it with: pip install '{named}'" if named else f"README.md, 'Install', says where one for {detected().device} is."


def check(stage: str) -> None:
    """Raise SettingError, with the repairing command, if `stage` cannot run on the vLLM that is installed; warn of an odd line."""
    name, have = installed_vllm()
    if not have:
        raise SettingError(f"Stage '{stage}' runs on vLLM, which is not installed. {install()}")
    match standing(have):
        case Standing.UNKNOWN:
            log.warning("%s is %s, which tells no line; the tested ones are %s to %s.", name, have, OLDEST, NEWEST)
        case Standing.UNSUPPORTED:
            wrong = f"Stage '{stage}' runs on vLLM {OLDEST} to {NEWEST}, and {name} {have} is installed."
            raise SettingError(f"{wrong} Repair it with: {repair(name)}")
        case Standing.UNTESTED:
            tested = ", ".join(TESTED)
            log.warning("%s %s is of a line that was not tested (tested: %s). If it fails: %s", name, have, tested, repair(name))
