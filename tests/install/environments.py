"""Environments with real pip and real uv, and packages that are nothing but their metadata, their version, and how they fail."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

ABOVE = ("torch", "vllm", "__editable__", "pip")
"""What each environment has of its own, or lacks."""


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: Iterable[str] = (),
    entries: str = "",
    scripts: Mapping[str, str] | None = None,
) -> Path:
    """Write a wheel with these files."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires), ""]
    content = {
        **files,
        **{f"{package}-{version}.data/scripts/{script}": text for script, text in (scripts or {}).items()},
        f"{info}/METADATA": "\n".join(metadata),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": entries} if entries else {}),
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in content.items())
    path = folder / f"{package}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**content, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(each, text)
    return path


def _short(path: Path) -> str:
    """What is in a file; of what the build found out, the verdict; of a program, what comes after the line with its interpreter."""
    content = path.read_bytes()
    if path.name == "vllm_omni.json":
        return str(json.loads(content)["device"])
    return hashlib.sha256(content.split(b"\n", 1)[-1] if content.startswith(b"#!") else content).hexdigest()


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class Environment:
    """A virtual environment with its own packages above those of the tests' environment, of which it sees none that begins like ABOVE."""

    def __init__(self, home: Path, links: Path, *, uv: bool = False) -> None:
        self.home, self.links, self.uv = home, links, uv
        self.variables: dict[str, str] = {}

    @classmethod
    def make(cls, home: Path, links: Path, *, uv: bool = False) -> Environment:
        """With pip from below, or without it."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        below = home / "below"
        below.mkdir()
        for entry in sorted(Path(sysconfig.get_path("purelib")).iterdir()):
            if not entry.name.startswith(ABOVE) or (entry.name.startswith("pip") and not uv):
                (below / entry.name).symlink_to(entry)
        made = cls(home, links, uv=uv)
        (made.site / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        return made

    def copy(self, home: Path) -> Environment:
        shutil.copytree(self.home, home, symlinks=True)
        made = Environment(home, self.links, uv=self.uv)
        (made.site / "below.pth").write_text(f"import site; site.addsitedir({str(home / 'below')!r})\n")
        return made

    @cached_property
    def site(self) -> Path:
        return next(self.home.glob("lib/python3*/site-packages"))

    def environ(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "VLLM_", "PYTHON", "VIRTUAL_ENV"))}
        offline = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.links),
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as: no isolation
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "UV_OFFLINE": "1",
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": str(self.links),
            "UV_NO_BUILD_ISOLATION": "1",
            "UV_CACHE_DIR": str(self.home / "cache"),
            "UV_LINK_MODE": "copy",
        }
        return {**own, **offline, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **self.variables}

    def run(self, *command: str, told: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=told, env=self.environ(), cwd=self.home, capture_output=True, text=True, check=False)

    def install(self, *words: str) -> None:
        begin = ["uv", "pip", "install", "--python", str(self.python)] if self.uv else [str(self.python), "-m", "pip", "install"]
        done = self.run(*begin, "--no-deps", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def doctor(self, *flags: str, told: str = "") -> subprocess.CompletedProcess[str]:
        return self.run(str(self.python), "-P", "-m", "vllm_omni", "doctor", *flags, told=told)

    @property
    def python(self) -> Path:
        return self.home / "bin/python"

    def content(self) -> dict[str, str]:
        """Its own files, by what is in them, but for what tools note down about an installation."""
        noted = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")
        files = [path for folder in (self.site, self.home / "bin") for path in folder.rglob("*") if path.is_file()]
        found = {str(path.relative_to(self.home)): path for path in files if path.name not in noted and path.suffix != ".pyc"}
        return {name: _short(path) for name, path in found.items()}
