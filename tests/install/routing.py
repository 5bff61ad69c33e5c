"""What an installation with real pip and real uv requires, cell by cell. Run by itself it prints them all as a table (`ci/routing`).

A cell: what the machine is made to look like, and by which sign; the tool, with or without build isolation; from an sdist, by way of a
wheel, or editable; with a cache that has never seen this project, or one that has a wheel of it for another device.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from machines import DRIVERS, torch_for, write
from tiny import distribution

from vllm_omni_platforms.detect import DEVICES

ROOT = Path(__file__).parents[2]
SIGNS = ("variable", "torch", "driver")
TOOLS, ISOLATION, FORMS, CACHES = ("pip", "uv"), ("isolated", "shared"), ("sdist", "wheel", "editable"), ("cold", "warm")


class Cell(NamedTuple):
    target: str
    sign: str
    tool: str
    isolation: str
    form: str
    cache: str


class Outcome(NamedTuple):
    """The device that the installed record names, and the vLLM that the installed metadata requires ("-": none)."""

    device: str
    requires: str


def cells() -> Iterator[Cell]:
    """All of them. `null` is never found, only asked for; "nothing" is a machine without any sign."""
    machines = [(target, sign) for target in DEVICES for sign in SIGNS if target != "null" or sign == "variable"]
    for (target, sign), tool, isolation, form, cache in itertools.product(
        [*machines, ("nothing", "nothing")], TOOLS, ISOLATION, FORMS, CACHES
    ):
        yield Cell(target, sign, tool, isolation, form, cache)


class Bench:
    """A folder for the installations of many cells. `python` is the interpreter of their environments."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
        self._number = itertools.count()

    @cached_property
    def checkout(self) -> Path:
        """A copy of what a build reads."""
        for name in ("vllm_omni", "platforms", "recipes"):
            shutil.copytree(ROOT / name, self.folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.folder / "checkout")
        return self.folder / "checkout"

    @cached_property
    def sdist(self) -> Path:
        self._run([*self._uv, "build", "--sdist", "--out-dir", str(self.folder / "sdist"), str(self.checkout)], self._environ(self.cache))
        (path,) = (self.folder / "sdist").glob("*.tar.gz")
        return path

    @cached_property
    def cache(self) -> Path:
        """A cache of both tools that has setuptools, and nothing of ours."""
        environ = self._environ(self.folder / "cache")
        for tool in TOOLS:
            self._run(self._install(tool, self.bare), environ, "setuptools>=77,<90")
        return self.folder / "cache"

    @cached_property
    def bare(self) -> Path:
        """An environment with setuptools."""
        home = self.folder / "bare"
        self._run([*self._uv, "venv", "--quiet", "--python", self.python, str(home)], dict(os.environ))
        self._run(self._install("uv", home), self._environ(self.folder / "cache"), "setuptools>=77,<90")
        return home

    def run(self, cell: Cell, *flags: str, there: Iterable[str] = ()) -> Outcome:
        """Install it, with these flags beside the usual ones, beside these distributions, and read what was installed.

        Raises RuntimeError with what the tool said if it fails.
        """
        folder = self.folder / f"cell-{next(self._number)}"
        try:
            cache = folder / "cache"
            shutil.copytree(self.cache, cache, symlinks=True)
            home, environ = self._machine(folder, cell)
            for name in there:
                name, _, version = name.partition("-")
                distribution(_site(home), name, version, plugin=None)
            if cell.cache == "warm":
                other = {**environ, "VLLM_OMNI_TARGET_DEVICE": "cpu" if cell.target == "cuda" else "cuda"}
                self._one(cell, folder / "before", self._environment(folder / "other"), cache, other)
            return self._one(cell, folder / "now", home, cache, environ, *flags)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _machine(self, folder: Path, cell: Cell) -> tuple[Path, dict[str, str]]:
        """The environment to install into, and the variables, that look like the cell's machine."""
        home = self._environment(folder / "home")
        environ = {"VLLM_OMNI_HOST_ROOT": str(folder / "root")}
        (folder / "root").mkdir()
        match cell.sign:
            case "variable":
                environ["VLLM_OMNI_TARGET_DEVICE"] = cell.target
            case "driver":
                write(folder / "root", DRIVERS[cell.target])
            case "torch":
                torch_for(cell.target, _site(home))
        return home, environ

    def _environment(self, home: Path) -> Path:
        shutil.copytree(self.bare, home, symlinks=True)
        return home

    def _one(self, cell: Cell, folder: Path, home: Path, cache: Path, environ: Mapping[str, str], *flags: str) -> Outcome:
        environ = {**self._environ(cache), **environ}
        isolated = [] if cell.isolation == "isolated" else ["--no-build-isolation"]
        install = [*self._install(cell.tool, home), *isolated]
        source = str(self.sdist)
        if cell.form != "sdist":
            source = shutil.copytree(self.checkout, folder / "checkout") if cell.cache == "cold" else str(self.checkout)
        if cell.form == "wheel":
            wheels = folder / "wheels"
            if cell.tool == "pip":
                build = [*self._pip(home), "wheel", "--quiet", "--no-deps", *isolated, "--wheel-dir", str(wheels)]
            else:
                build = [*self._uv, "build", "--quiet", "--wheel", "--python", f"{home}/bin/python", *isolated, "--out-dir", str(wheels)]
            self._run(build, environ, str(source))
            source = str(next(wheels.glob("vllm_omni-*.whl")))
        self._run(install, environ, *flags, *(["-e"] if cell.form == "editable" else []), str(source))
        (info,) = _site(home).glob("vllm_omni-*.dist-info")
        needs = [line.partition(": ")[2] for line in (info / "METADATA").read_text().splitlines() if line.startswith("Requires-Dist: vllm")]
        plain = [need for need in needs if "extra ==" not in need]
        return Outcome(json.loads((info / "vllm_omni.json").read_text())["device"], plain[0] if plain else "-")

    @property
    def _uv(self) -> list[str]:
        return [sys.executable, "-m", "uv"]

    def _pip(self, home: Path) -> list[str]:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", f"{home}/bin/python"]

    def _install(self, tool: str, home: Path) -> list[str]:
        if tool == "pip":
            return [*self._pip(home), "install", "--quiet", "--no-deps"]
        return [*self._uv, "pip", "install", "--quiet", "--no-deps", "--python", f"{home}/bin/python"]

    def _environ(self, cache: Path) -> dict[str, str]:
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VLLM_OMNI_") and name not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        return {**own, "PIP_CACHE_DIR": str(cache / "pip"), "UV_CACHE_DIR": str(cache / "uv"), "UV_LINK_MODE": "copy"}

    def _run(self, command: list[str], environ: Mapping[str, str], *more: str) -> None:
        done = subprocess.run([*command, *more], env=dict(environ), cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join([*command, *more])}\n{done.stdout}{done.stderr}")


def _site(home: Path) -> Path:
    """The packages of an environment."""
    return next(home.glob("lib/python3*/site-packages"))


def line(cell: Cell, outcome: Outcome) -> str:
    return "\t".join((*cell, *outcome))


if __name__ == "__main__":
    assert find_spec("uv"), "pip install uv"
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        for cell in cells():
            if all(word in cell for word in sys.argv[1:]):
                print(line(cell, bench.run(cell)), flush=True)
