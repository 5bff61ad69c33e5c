"""`vllm-omni doctor`: the device and how it was found, what is installed, and what is wrong. Exits with 1 if anything of that is fatal."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict

from vllm_omni import __version__
from vllm_omni.discovery import installed, installed_vllm
from vllm_omni.doctor import examine
from vllm_omni.settle import detected

WARNED = 3
"""The exit code when nothing is fatal, and something is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.epilog = f"Exit code: 0 if nothing is wrong, 1 if something keeps stages from starting, {WARNED} if it is less than that."


def run(args: argparse.Namespace) -> int:
    found, device = examine(), detected()
    name, have = installed_vllm()
    facts = {
        "vllm-omni": __version__,
        "python": platform.python_version(),
        name: have or "not installed",
        "device": device.device,
        "plugins": [str(plugin) for plugin in installed()],
    }
    if args.json:
        probes = [probe._asdict() for probe in device.probes]
        print(json.dumps({**facts, "probes": probes, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        for fact, value in facts.items():
            print(f"{fact:10}  {', '.join(value) if isinstance(value, list) else value}")
        winner = next(probe for probe in device.probes if probe.device)
        for probe in device.probes:
            print(f"  {probe.source}: {probe.device or '-'} ({probe.found}){' <-' if probe is winner else ''}")
        for number, finding in enumerate(found, 1):
            print(f"\n{number}. {finding.what}{' FATAL' if finding.fatal else ''}\n   {finding.why}")
            if finding.command:
                print(f"   {finding.command}")
        print("" if found else "\nNothing is wrong.")
    return 0 if not found else 1 if any(finding.fatal for finding in found) else WARNED
