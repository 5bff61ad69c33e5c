"""The lines of vLLM (0.32, say) that this core works with, and what is said to one that has another. Imports no vLLM."""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_omni.discovery import installed_vllm
from vllm_omni.errors import SettingError
from vllm_omni.settle import detected

log = logging.getLogger("vllm_omni")

LINES = ((0, 26), (0, 28), (0, 30), (0, 32))
"""The supported lines, oldest first. Those between them are odd ones: nobody tested them."""

SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's own server, run as a program: the command `vllm` needs a distribution of that name, which some builds lack."""


def line_of(version: str) -> tuple[int, ...] | None:
    """0.32 of "0.32.1"; None for what a build from source without tags calls itself."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return None if parsed.release[:2] == (0, 1) and parsed.is_devrelease else parsed.release[:2]


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
    oldest, newest = (f"{line[0]}.{line[1]}" for line in (LINES[0], LINES[-1]))
    repair = f"pip install '{name}>={newest},<{LINES[-1][0]}.{LINES[-1][1] + 1}'"
    if not have:
        raise SettingError(f"Stage '{stage}' runs on vLLM, which is not installed. {install()}")
    line = line_of(have)
    if line is None:
        log.warning("%s is %s, which tells no line; the tested ones are %s to %s.", name, have, oldest, newest)
        return
    if not LINES[0] <= line <= LINES[-1]:
        raise SettingError(f"Stage '{stage}' runs on vLLM {oldest} to {newest}, and {name} {have} is installed. Repair it with: {repair}")
    if line not in LINES:
        tested = ", ".join(f"{line[0]}.{line[1]}" for line in LINES)
        log.warning("%s %s is of a line that was not tested (tested: %s). If it fails: %s", name, have, tested, repair)
