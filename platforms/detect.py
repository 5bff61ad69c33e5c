"""Which device this machine has, and how that was found out.

Standard library only, because setup.py runs it before anything is installed. It reads the environment and files; it imports no
torch, runs no tool and loads no driver.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

DEVICES = ("cuda", "rocm", "xpu", "npu", "musa", "cpu", "null")
"""Where a machine has several, the first one wins; `null` is for tests and is never found."""
VARIABLE = "VLLM_OMNI_TARGET_DEVICE"
ROOT = "VLLM_OMNI_HOST_ROOT"
"""Another root to look for drivers in: a container's builder may have the host's mounted there."""

ROCM_TARGETS = frozenset("gfx90a gfx942 gfx950 gfx1100 gfx1101 gfx1150 gfx1151 gfx1200 gfx1201".split())  # noqa: SIM905
"""The AMD GPUs that vLLM runs on, by its installation page for ROCm. Others (gfx1103, say: integrated) are no accelerators."""
_UV_BUILD = "builds-v0"
"""A folder in the path of each environment that uv builds in."""


class Probe(NamedTuple):
    """One source that was asked. `device` is its verdict, None if it had none; `found` says what it saw."""

    source: str
    device: str | None
    found: str


class Detected(NamedTuple):
    """The winner, why it won, and every probe in the order it was asked."""

    device: str
    reason: str
    probes: tuple[Probe, ...]


class Target(NamedTuple):
    """The environment that is installed into: its folders of packages, and how it was found. None: nobody knows which it is.

    `exact`: the tool uninstalls what is no longer required, so what is there must be required all the same.
    """

    sites: tuple[Path, ...] | None
    found: str
    exact: bool = False


def detect(environ: Mapping[str, str] = os.environ, root: Path | None = None, target: Target | None = None) -> Detected:
    """The device to build for: the variable's, else that of the torch in `target`, else that of a visible driver, else the CPU.

    `root` is where /proc, /sys and /dev are looked for (None: the variable ROOT's value, else /). Raises ValueError if the variable
    names no device.
    """
    root = root or Path(environ.get(ROOT) or "/")
    torch = _readable("torch", lambda: _torch(target if target is not None else target_environment()))
    drivers = (_readable(source, partial(look, source, root)) for source, look in _DRIVERS.items())
    probes = (_variable(environ), torch, *drivers, Probe("fallback", "cpu", "every machine has a CPU"))
    winner = next(probe for probe in probes if probe.device)
    return Detected(str(winner.device), f"{winner.source}: {winner.found}", probes)


def _readable(source: str, look: Callable[[], Probe]) -> Probe:
    try:
        return look()
    except OSError as error:
        return Probe(source, None, f"could not be read: {error}")


def target_environment(prefix: Path = Path(sys.prefix), parent: Path | None = None) -> Target:
    """Where this process installs to. pip builds with the interpreter it installs for; uv in a place of its own, so its process is asked.

    `parent` is the folder in /proc of the process that started this one.
    """
    if _UV_BUILD not in prefix.parts:
        seen = [Path(entry) for entry in sys.path if os.path.isabs(entry)]
        hidden = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]  # by pip, from an isolated build
        others = _below(prefix) if prefix != Path(sys.base_prefix) else [Path(site.getusersitepackages())]
        return Target(tuple(dict.fromkeys([*seen, *hidden, *others])), f"the environment {prefix}")
    try:
        return _told_by_uv(parent or Path("/proc", str(os.getppid())))
    except OSError as error:
        return Target(None, f"target unknown: {error}")


def _packages(home: Path) -> list[Path]:
    """Where an environment, or an installation of Python, has its packages; then those of the one below it that it sees."""
    folders = (
        "lib/python3*/site-packages",
        "lib64/python3*/site-packages",
        "lib/python3*/dist-packages",
        "local/lib/python3*/dist-packages",
    )
    return [found for pattern in folders for found in sorted(home.glob(pattern))] + _below(home)


def _below(home: Path) -> list[Path]:
    """The packages that an environment sees and does not have: those of the Python it was made from, if it was made so."""
    try:
        told = dict(
            re.findall(r"^([\w-]+) *= *(.+?) *$", (home / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        )
    except OSError:
        return []
    shows = told.get("include-system-site-packages", "").lower() == "true"
    return _packages(Path(told["home"]).resolve().parent) if shows and "home" in told else []


def _told_by_uv(parent: Path) -> Target:
    words = (parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
    environ = dict(item.split("=", 1) for item in (parent / "environ").read_bytes().decode(errors="replace").split("\0") if "=" in item)
    folder, exact = Path(os.readlink(parent / "cwd")), not {"pip", "build"} & set(words)
    for how, place in _places(words, environ, folder):
        home = folder / place
        if how in ("--target", "-t"):
            return Target((home,), f"uv's {how} {home}", exact)
        if home.is_file() and home.name.startswith("python"):
            home = home.parent.parent
        if sites := tuple(_packages(home)):
            return Target(sites, f"uv's {how}: {home}", exact)
        if how.startswith("-"):
            return Target(None, f"target unknown: uv was told {how} {place}", exact)
    return Target(None, "target unknown: uv was told no environment", exact)


def _places(words: list[str], environ: Mapping[str, str], folder: Path) -> Iterator[tuple[str, str]]:
    """Where uv would look for the environment, in its order. What a flag names is the only place."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in ("--target", "-t", "--prefix"):
            yield flag, value if equals else following
        elif flag in ("--python", "-p") and not re.fullmatch(r"[\d.]+", named := value if equals else following):
            yield flag, _interpreter(named, environ)  # a version alone chooses among environments
        elif flag == "--system":
            yield flag, _interpreter("python3", environ)
    if environ.get("UV_SYSTEM_PYTHON", "").lower() in ("1", "true", "yes", "on"):
        yield "--system", _interpreter("python3", environ)
    project = [("its project", environ["UV_PROJECT_ENVIRONMENT"])] if "UV_PROJECT_ENVIRONMENT" in environ else []
    project += [("its project", str(above / ".venv")) for above in (folder, *folder.parents)]
    active = [(name, environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    yield from [*active, *project] if "pip" in words else [*project, *active]
    if environ.get("UV_PYTHON"):
        yield "UV_PYTHON", _interpreter(environ["UV_PYTHON"], environ)


def _interpreter(named: str, environ: Mapping[str, str]) -> str:
    """The path of an interpreter, or of an environment, that may be named by a program on the path."""
    return named if "/" in named else shutil.which(named, path=environ.get("PATH")) or named


def _variable(environ: Mapping[str, str]) -> Probe:
    value = environ.get(VARIABLE, "").strip()
    if not value:
        return Probe(VARIABLE, None, "not set")
    if value not in DEVICES:
        near = difflib.get_close_matches(value.lower(), DEVICES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"{VARIABLE} is '{value}', which is no device; it can be {', '.join(DEVICES)}.{hint}")
    return Probe(VARIABLE, value, f"is '{value}'")


def _torch(target: Target) -> Probe:
    if target.sites is None:
        return Probe("torch", None, target.found)
    for folder in target.sites:
        for extension, device in (("torch_npu", "npu"), ("torch_musa", "musa")):
            if (folder / extension / "__init__.py").is_file():
                return Probe("torch", device, f"{extension} is in {folder}")
        file = folder / "torch/version.py"
        if file.is_file():
            told = read_build(file)
            if "__version__" not in told:
                return Probe("torch", None, f"{file} could not be understood")
            built = next((device for name, device in _TORCH_BUILDS if told.get(name)), "cpu")
            return Probe("torch", built, f"torch {told['__version__']} in {folder} is built for it")
    return Probe("torch", None, f"none in {target.found}")


def read_build(file: Path) -> dict[str, str]:
    """The texts that a version.py of PyTorch's or its companions' sets; {} if it is not there."""
    if not file.is_file():
        return {}
    return dict(re.findall(r"^(\w+)\b[^=\n]*= *'([^'\n]*)'", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE))


_TORCH_BUILDS = (("cuda", "cuda"), ("hip", "rocm"), ("rocm", "rocm"), ("xpu", "xpu"))
"""The values of torch/version.py that are set in a build for a device."""


def _nvidia(source: str, root: Path) -> Probe:
    driver, nodes = root / "proc/driver/nvidia/version", _numbered(root / "dev", "nvidia")
    if not driver.is_file():
        window, library = root / "dev/dxg", root / "usr/lib/wsl/lib/libcuda.so.1"
        if window.exists() and library.is_file():
            return Probe(source, "cuda", f"WSL's {window} and {library}")
        return Probe(source, None, f"no file {driver}")
    version = re.search(r"Kernel Module(?: +for +\S+)? +(\d+(?:\.\d+)+)", driver.read_text(encoding="utf-8", errors="replace"))
    if version is None:
        return Probe(source, None, f"{driver} could not be understood")
    if not nodes:
        return Probe(source, None, f"{driver} exists, but no device file {root / 'dev/nvidia*'} does")
    return Probe(source, "cuda", f"{driver} ({version[1]}) and {_count(nodes)}")


def _amd(source: str, root: Path) -> Probe:
    kfd = root / "dev/kfd"
    if not kfd.exists():
        return Probe(source, None, f"no device file {kfd}")
    targets = set()
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        told = re.search(r"^gfx_target_version +(\d+)$", node.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if told and (number := int(told[1])):
            targets.add(f"gfx{number // 10_000}{number // 100 % 100:x}{number % 100:x}")
    if able := sorted(targets & ROCM_TARGETS):
        return Probe(source, "rocm", f"{kfd} and a GPU of {', '.join(able)}")
    return Probe(source, None, f"{kfd} exists, but no GPU that vLLM supports (found: {', '.join(sorted(targets)) or 'none'})")


def _intel(source: str, root: Path) -> Probe:
    """Integrated GPUs of Intel's are always the PCI device 00:02.0; vLLM is for cards."""
    found = []
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        device = node / "device"
        if _first_line(device / "vendor") == "0x8086" and (root / "dev/dri" / node.name).exists():
            found.append(device.resolve().name)
    cards = [place for place in found if not place.endswith(":00:02.0")]
    if cards:
        return Probe(source, "xpu", f"{_count(cards)} in {root / 'dev/dri'} at {', '.join(cards)}")
    return Probe(source, None, "an integrated GPU only" if found else f"no GPU of Intel's in {root / 'dev/dri'}")


def _ascend(source: str, root: Path) -> Probe:
    manager, nodes = root / "dev/davinci_manager", _numbered(root / "dev", "davinci")
    if not manager.exists():
        return Probe(source, None, f"no device file {manager}")
    if not nodes:
        return Probe(source, None, f"{manager} exists, but no device file {root / 'dev/davinci*'} does")
    return Probe(source, "npu", f"{manager} and {_count(nodes)}")


def _moore_threads(source: str, root: Path) -> Probe:
    nodes = _numbered(root / "dev", "mtgpu")
    if not nodes:
        return Probe(source, None, f"no device file {root / 'dev/mtgpu*'}")
    if not any(_first_line(vendor) == "0x1ed5" for vendor in (root / "sys/bus/pci/devices").glob("*/vendor")):
        return Probe(source, None, f"{nodes[0]} exists, but no PCI device of Moore Threads' does")
    return Probe(source, "musa", f"a PCI device and {_count(nodes)}")


_DRIVERS: dict[str, Callable[[str, Path], Probe]] = {
    "NVIDIA driver": _nvidia,
    "AMD driver": _amd,
    "Intel driver": _intel,
    "Ascend driver": _ascend,
    "Moore Threads driver": _moore_threads,
}


def _numbered(folder: Path, name: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{name}*") if re.fullmatch(rf"{name}\.?\d+", path.name))


def _first_line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def _count(nodes: list[str] | list[Path]) -> str:
    return f"{len(nodes)} device{'s' if len(nodes) > 1 else ''}"
