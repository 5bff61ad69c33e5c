"""Adds to pyproject.toml what the environment that is installed into needs: the requirements of every device, and those of its own.

`platforms/detect.py` says which device that is, and `platforms/stack.py` what of its stack is missing. What was found out travels in
the wheel, as `vllm_omni.json` beside its metadata: `vllm-omni doctor` compares it with the machine that it runs on.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import setuptools
from setuptools import find_packages, setup
from setuptools.command.egg_info import egg_info

PLATFORMS = Path(__file__).parent / "platforms"
DETECT, STACK = (runpy.run_path(str(PLATFORMS / f"{name}.py")) for name in ("detect", "stack"))

if int(setuptools.__version__.partition(".")[0]) < 77:
    raise SystemExit(f"vllm-omni is built with setuptools 77 or later, and {setuptools.__version__} is here: pip install -U setuptools")
if sys.platform != "linux":
    raise SystemExit(f"vllm-omni runs on Linux only, and this is {sys.platform}.")
try:
    target = DETECT["target_environment"]()
    detected = DETECT["detect"](target=target)
    wanted = STACK["requirements"](PLATFORMS, detected.device)
    choice = STACK["choose"](detected.device, wanted, () if target.exact else target.sites)
except ValueError as error:
    raise SystemExit(f"vllm-omni: {error}") from None
RECORD = {
    "device": detected.device,
    "reason": detected.reason,
    "probes": [probe._asdict() for probe in detected.probes],
    "requires": choice.requirements,
    "why": choice.reason,
    "without_vllm": choice.without_vllm,
}
print(f"vllm-omni: building for {detected.device} ({detected.reason}); {choice.reason}")


class Record(egg_info):
    """setuptools copies what lies beside the metadata into the wheel."""

    def run(self) -> None:
        super().run()
        Path(self.egg_info, "vllm_omni.json").write_text(json.dumps(RECORD, indent=1) + "\n", encoding="utf-8")


setup(
    packages=[*find_packages(include=["vllm_omni", "vllm_omni.*"]), "vllm_omni_platforms", "vllm_omni_recipes"],
    install_requires=[*STACK["requirements"](PLATFORMS, "base"), *choice.requirements],
    extras_require={
        **{device: STACK["requirements"](PLATFORMS, device) for device in DETECT["DEVICES"]},
        "denoise": STACK["requirements"](PLATFORMS, "denoise"),
        "demo": ["openai>=1.60,<4"],  # Apache-2.0: the client that `vllm-omni demo` asks with
    },
    cmdclass={"egg_info": Record},
)
