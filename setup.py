"""Adds the requirements to pyproject.toml: those of every device, and as an extra, `vllm`, those of the device that is detected."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PLATFORMS = runpy.run_path(str(HERE / "platforms/detect.py"))


def requirements(name: str) -> list[str]:
    lines = (HERE / "platforms" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


if sys.platform != "linux":
    raise SystemExit(f"vllm-omni runs on Linux only, and this is {sys.platform}.")
try:
    detected = PLATFORMS["detect"]()
except ValueError as error:
    raise SystemExit(str(error)) from None
print(f"vllm-omni: building for {detected.device} ({detected.reason})")

setup(
    packages=[*find_packages(include=["vllm_omni", "vllm_omni.*"]), "vllm_omni_platforms", "vllm_omni_recipes"],
    install_requires=requirements("base"),  # a vLLM that is there already is never replaced
    extras_require={
        **{device: requirements(device) for device in PLATFORMS["DEVICES"]},
        "vllm": requirements(detected.device),
        "demo": ["openai>=1.60,<4"],  # Apache-2.0: the client that `vllm-omni demo` asks with
    },
)
