"""Every example of the README runs and prints what the README shows; its tables say what the code does.

A block is run in the order of its section, in one folder, by a virtual environment of its own. A text block after it is what it
prints, `…` standing for anything. Ports are replaced; a block after a comment that begins with "not run" is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Running, free_port

from vllm_omni.cli.main import COMMANDS
from vllm_omni.serving.chat import ChatBody
from vllm_omni.serving.fields import Body
from vllm_omni.serving.images import EditBody, GenerationBody
from vllm_omni.serving.speech import SpeechBody
from vllm_omni.serving.videos import VideoBody

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"(?:<!-- (?P<skipped>not run)[^\n]*\n)?```(?P<language>\w*) ?(?P<file>\S*)\n(?P<text>.*?)```", re.DOTALL)


def blocks(section: str) -> list[re.Match[str]]:
    return list(BLOCK.finditer(SECTIONS[section]))


def runs(block: re.Match[str]) -> bool:
    return block["language"] in ("bash", "python") and not block["skipped"] and not block["file"]


RUNNABLE = [name for name in SECTIONS if any(map(runs, blocks(name)))]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a virtual environment that sees the packages of this one, and into which a block may install."""
    bin_dir = tmp_path / "venv/bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for name, module in {"pip": "pip", "pytest": "pytest", "vllm-omni": "vllm_omni"}.items():
        more = " --no-build-isolation --quiet --disable-pip-version-check" if name == "pip" else ""
        (bin_dir / name).write_text(f'#!/bin/sh\nexec "{bin_dir}/python" -m {module} "$@"{more}\n')
        (bin_dir / name).chmod(0o755)
    return {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path / "venv")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize("section", RUNNABLE)
def test_the_examples_of_a_section(section: str, shell: dict[str, str], folder: Path) -> None:
    port = free_port()
    server: subprocess.Popen[bytes] | None = None
    printed = None
    try:
        for block in blocks(section):
            text = block["text"].replace("localhost:8000", f"127.0.0.1:{port}")
            if runs(block) and text.startswith("vllm-omni serve") and "--dry-run" not in text:
                command = [*text.split(), "--host", "127.0.0.1", "--port", str(port)]
                with (folder / "log").open("wb") as log:
                    server = subprocess.Popen(command, env=shell, cwd=folder, stdout=log, stderr=log)
                Running(server, port, folder / "log").wait_ready()
            elif runs(block):
                program = ["bash", "-euo", "pipefail"] if block["language"] == "bash" else ["python"]
                (folder / "block").write_text(text)
                ran = subprocess.run([*program, "block"], env=shell, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
                assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
                printed = ran.stdout
            elif block["language"] == "text":
                pattern = ".*".join(map(re.escape, text.strip().split("…")))
                assert printed is not None and re.fullmatch(pattern, printed.strip(), re.DOTALL), f"{text}\n{printed}"
    finally:
        if server is not None:
            server.kill()
            server.wait()


def test_what_is_written_without_a_language_is_a_drawing() -> None:
    assert {block["language"] for name in SECTIONS for block in blocks(name)} == {"", "bash", "python", "text"}
    assert len(RUNNABLE) >= 4


def test_the_plugin_shown_is_the_one_written(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "vllm_omni", "new-plugin", "backwards"], cwd=folder, check=True, capture_output=True)
    shown = {block["file"]: block["text"] for block in blocks("Write a plugin in ten minutes") if block["file"]}
    assert sorted(shown) == ["bridges.py", "plugin.py", "stages.py"]
    for name, text in shown.items():
        assert text == (folder / "backwards" / name).read_text()


def test_every_command_is_listed() -> None:
    assert set(re.findall(r"^\| `vllm-omni ([\w-]+)", SECTIONS["Commands"], re.MULTILINE)) == set(COMMANDS)


BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/audio/speech": SpeechBody,
    "/v1/images/generations": GenerationBody,
    "/v1/images/edits": EditBody,
    "/v1/videos": VideoBody,
}


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_the_field_tables_say_what_the_code_does(path: str, body: type[Body]) -> None:
    section = SECTIONS["What of OpenAI's protocol is supported"].partition(f"### `{path}`")[2].partition("###")[0]
    rows = {title: set(re.findall(r"`(\w+)`", names)) for title, names in re.findall(r"^\| ([^|`]+?) \| (`.*) \|$", section, re.MULTILINE)}
    assert rows == {
        title: set(names)
        for title, names in {
            "have an effect": body.model_fields,
            "parameters, if the model declares them": body.parameters,
            "accepted, without effect by nature": body.silent,
            "refused, except at the value that asks for nothing": body.neutral,
        }.items()
        if names
    }


def links() -> Iterator[str]:
    yield from re.findall(r"\]\((?!https:)([^)#]+)\)", README)
    yield from re.findall(r"`((?:ci|tests|platforms|recipes|model_plugins)/[\w./-]*)`", README)


@pytest.mark.parametrize("link", sorted(set(links())))
def test_what_is_named_exists(link: str) -> None:
    assert (ROOT / link).exists()
