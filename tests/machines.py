"""What machines and environments are made to look like: drivers' files under another root, a torch that is nothing but its version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tiny import distribution

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.65.06  Thu Jul 10 15:04:11 UTC 2025\nGCC version: 12\n"
NVIDIA = {"proc/driver/nvidia/version": DRIVER.format(580), "dev/nvidia0": ""}
AMD = {"dev/kfd": "", "sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\n"}
MI300 = {**AMD, "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 1216\ngfx_target_version 90402\n"}
INTEL = {"dev/dri/renderD128": "", "sys/class/drm/renderD128/device/vendor": "0x8086\n"}
ASCEND = {"dev/davinci_manager": "", "dev/davinci0": "", "dev/davinci1": ""}
MUSA = {"dev/mtgpu.0": "", "sys/bus/pci/devices/0000:05:00.0/vendor": "0x1ed5\n"}
DRIVERS: dict[str, dict[str, str]] = {"cuda": NVIDIA, "rocm": MI300, "xpu": INTEL, "npu": ASCEND, "musa": MUSA, "cpu": {}}
"""A machine with one card of each device."""

TORCHES = {
    "cuda": ("2.13.0+cu130", "cuda"), "rocm": ("2.13.0+rocm7.2", "hip"), "xpu": ("2.13.0+xpu", "xpu"), "npu": ("2.10.0", ""),
    "musa": ("2.7.1", ""), "cpu": ("2.13.0+cpu", ""),
}  # fmt: skip
"""The version of a torch for each device, and the value of its version.py that is set."""
VERSION = """from typing import Optional
__all__ = ['__version__', 'cuda', 'hip', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
rocm: Optional[str] = None
xpu: Optional[str] = {xpu}
"""


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """The files in the folder, which is given back."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def torch_for(device: str, site: Path) -> Path:
    """An environment's packages, with a torch for a device."""
    version, name = TORCHES[device]
    distribution(site, "torch", version, plugin=None)
    values = {each: "'1'" if each == name else "None" for each in ("cuda", "hip", "xpu")}
    extension = {f"torch_{device}/__init__.py": ""} if device in ("npu", "musa") else {}
    return write(site, {"torch/version.py": VERSION.format(version=version, **values), **extension})
