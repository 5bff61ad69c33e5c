"""`vllm-omni doctor`: the device and how it was found, what is installed, what is wrong, and (`--fix`) its repair."""

from __future__ import annotations

import argparse
import json
import platform as python
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict

from vllm_omni import __version__
from vllm_omni.discovery import installed, installed_vllm
from vllm_omni.doctor import Finding, Repairs, examine
from vllm_omni.errors import SettingError
from vllm_omni.machine import build, detected
from vllm_omni.platform import platform

WARNED = 3
"""The exit code when nothing is fatal, and something is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="for programs")
    how.add_argument("--fix", action="store_true", help="show what would be changed, ask, change just that, and write down how to undo it")
    parser.add_argument("-y", "--yes", action="store_true", help="with --fix: do not ask")
    parser.epilog = f"Exit code: 0 if nothing is wrong, 1 if something keeps stages from starting, {WARNED} if it is less than that."


def run(args: argparse.Namespace) -> int:
    if args.yes and not args.fix:
        args.parser.error("-y has no effect without --fix")
    found = examine()
    if args.json:
        device = detected()
        probes = [probe._asdict() for probe in device.probes]
        findings = [{key: value for key, value in asdict(each).items() if key != "repairs"} for each in found]
        print(json.dumps({**_facts(), "probes": probes, "findings": findings}, indent=2))
    else:
        _tell(found)
        if args.fix and found and not _fix(found, sure=args.yes):
            return 1
        if args.fix and found:
            print("\nAfter that:")
            _list(found := examine())
    return 0 if not found else 1 if any(finding.fatal for finding in found) else WARNED


def _facts() -> dict[str, str | list[str]]:
    name, have = installed_vllm()
    device = detected().device
    return {
        "vllm-omni": __version__,
        "python": python.python_version(),
        "torch": build("torch").get("__version__", "not installed"),
        name: have or "not installed",
        "device": device if platform(device).tested else f"{device} (untested on hardware)",
        "plugins": [str(plugin) for plugin in installed()],
    }


def _tell(found: Iterable[Finding]) -> None:
    for fact, value in _facts().items():
        print(f"{fact:10}  {', '.join(value) if isinstance(value, list) else value}")
    probes = detected().probes
    winner = next(probe for probe in probes if probe.device)
    for probe in probes:
        print(f"  {probe.source}: {probe.device or '-'} ({probe.found}){' <-' if probe is winner else ''}")
    _list(found)


def _list(found: Iterable[Finding]) -> None:
    for number, finding in enumerate(found, 1):
        print(f"\n{number}. {finding.what}{' FATAL' if finding.fatal else ''}\n   {finding.why}")
        if finding.command:
            print(f"   {finding.command}")
    print("" if found else "\nNothing is wrong.")


def _fix(found: Iterable[Finding], *, sure: bool) -> bool:
    """Whether all that was planned was done."""
    repairs = Repairs()
    print("Plan:")
    for number, finding in enumerate(found, 1):
        for line in _plan(repairs, finding):
            print(f"{number}. {line}")
    if not repairs.planned:
        print("Nothing of this can be repaired from here.")
        return False
    print("\nNothing else is changed.")
    if not sure:
        print("Do it? [y/N] ", end="", flush=True)
        if (sys.stdin.readline() if sys.stdin else "").strip().lower() not in ("y", "yes"):
            print("Nothing was changed.")
            return False
    try:
        if more := repairs.do():
            print(f"Changed as well: {', '.join(more)}.")
    finally:
        print(f"To undo it: sh {shlex.quote(str(repairs.script))}" if repairs.undo else "There is nothing in it to undo.")
    return True


def _plan(repairs: Repairs, finding: Finding) -> Iterable[str]:
    """Adds the first of the finding's repairs that can be done, and says what it changes, or why nothing can be done."""
    failed: list[str] = []
    for repair in finding.repairs:
        try:
            return [*failed, *map(str, repairs.add(repair))]
        except SettingError as error:
            failed.append(f"not possible: {error.message}")
    return failed or [f"yours to do: {finding.command or finding.what}"]
