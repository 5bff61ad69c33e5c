"""What `vllm-omni new-plugin` writes installs, is listed, serves and passes its own tests; the contract suite notices what breaks it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from vllm_omni.cli.main import main
from vllm_omni.testing.prove import contract_claims, maturity

NAME = "written-by-test"
MODULE = "vllm_omni_written_by_test"


class Plugin:
    """A written plugin, installed in a folder of its own; the module there is a link to what was written, as in an editable install."""

    def __init__(self, folder: Path) -> None:
        self.source, self.site = folder / NAME, folder / "site"
        assert main(["new-plugin", NAME, "--dir", str(folder)]) == 0
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(self.site), str(self.source)], check=True)
        self.installed = {path.name for path in (self.site / MODULE).iterdir()}
        self.link()

    def link(self) -> None:
        shutil.rmtree(self.site / MODULE)
        (self.site / MODULE).symlink_to(self.source)

    def copy(self, folder: Path) -> Plugin:
        """A copy that may be broken."""
        other = Plugin.__new__(Plugin)
        other.source, other.site = folder / NAME, folder / "site"
        shutil.copytree(self.source, other.source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        shutil.copytree(self.site, other.site, symlinks=True)
        (other.site / MODULE).unlink()
        (other.site / MODULE).symlink_to(other.source)
        return other

    def change(self, file: str, old: str, new: str) -> None:
        path = self.source / file if (self.source / file).exists() else next(self.site.glob(f"*.dist-info/{file}"))
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, "-m", *command], env=environ, cwd=self.site, capture_output=True, text=True, check=False)

    def test(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(self.source / "tests"), *arguments)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    return Plugin(tmp_path_factory.mktemp("written"))


def test_only_what_runs_is_installed(plugin: Plugin) -> None:
    assert plugin.installed - {"__pycache__"} == {"README.md", "__init__.py", "bridges.py", "default.yaml", "plugin.py", "stages.py"}


def test_it_passes_its_own_tests_as_written(plugin: Plugin) -> None:
    ran = plugin.test()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(contract_claims()) + 1} passed" in ran.stdout


def test_it_is_listed_and_its_graph_shown(plugin: Plugin) -> None:
    listed = json.loads(plugin.run("vllm_omni", "models", "--json").stdout)
    assert NAME in json.dumps(listed)
    assert "codes" in plugin.run("vllm_omni", "graph", NAME).stdout


def test_it_serves(plugin: Plugin) -> None:
    command = [sys.executable, "-m", "vllm_omni", "serve", NAME, "--host", "127.0.0.1", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(plugin.site)}
    with subprocess.Popen(command, env=environ, cwd=plugin.site, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        try:
            for line in server.stderr:
                lines.append(line)
                if "Ready" in line:
                    break
            url = re.search(r"http://\S+", lines[-1] if lines else "")
            assert url is not None, "".join(lines)
            with openai.OpenAI(base_url=f"{url[0]}/v1", api_key="none") as client:
                messages: Any = [{"role": "user", "content": "stressed desserts"}]
                answer = client.chat.completions.create(model=NAME, messages=messages, extra_body={"shout": True})
        finally:
            server.terminate()
            server.stderr.read()
    assert answer.choices[0].message.content == "DESSERTS STRESSED"
    assert server.returncode == 0


def test_its_proof_is_written_and_believed_and_withdrawn(plugin: Plugin, tmp_path: Path) -> None:
    copy = plugin.copy(tmp_path)
    ran = copy.run("vllm_omni.testing.prove", str(copy.source))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    proof = json.loads((copy.source / "proof.json").read_text())
    assert set(proof) == {"version", "vllm", "claims", "maturity", "date"}
    assert (proof["version"], proof["maturity"]) == ("0.1.0", "beta")
    assert set(proof["claims"]) == contract_claims()
    assert "beta" in copy.run("vllm_omni", "models").stdout
    copy.change("stages.py", "letters[::-1]", "letters")
    assert copy.run("vllm_omni.testing.prove", str(copy.source)).returncode == 1
    assert not (copy.source / "proof.json").exists()


def test_only_the_installed_folder_can_be_proved(plugin: Plugin, tmp_path: Path) -> None:
    ran = plugin.run("vllm_omni.testing.prove", str(plugin.copy(tmp_path).source))
    assert ran.returncode == 2
    assert "pip install -e" in ran.stderr
    assert "is no plugin folder" in plugin.run("vllm_omni.testing.prove", str(tmp_path)).stderr


def test_maturity_follows_from_the_claims() -> None:
    assert maturity(contract_claims() | {"parity", "figures"}) == "production"
    assert maturity(contract_claims() | {"parity"}) == "beta"
    assert maturity((contract_claims() | {"parity", "figures"}) - {"abort"}) == "experimental"


ENDLESS = """try:
                yield Payload(CODES, word)
            except GeneratorExit:
                import asyncio
                await asyncio.Event().wait()"""
BROKEN = [
    ("test_the_declaration_is_light", "plugin.py", "from vllm_omni.api import TEXT", "import numpy\nfrom vllm_omni.api import TEXT"),
    ("test_the_plugin_says_which_core_it_needs", "METADATA", "<0.33,", ""),
    ("test_the_graph_is_sound", "plugin.py", 'help="answer in capitals"', ""),
    ("test_what_the_graphs_name_exists", "plugin.py", "bridges:words", "bridges:wrods"),
    ("test_what_the_graphs_name_exists", "bridges.py", "async def words(", "words = print\n\n\nasync def others("),
    ("test_bridges_give_the_same_whole_or_in_chunks", "bridges.py", "np.concatenate([held, chunk.data])", "chunk.data"),
    ("test_it_runs_end_to_end", "stages.py", "tokens=1)", "tokens=np.int32(1))"),
    ("test_the_same_request_gives_the_same_again", "stages.py", "word[len(letters) :]", "word[len(letters) :] + str(id(chunk) ** 9)"),
    ("test_a_row_of_a_batch_equals_its_solo_run", "stages.py", "for job, chunk in rows]", "for job, chunk in [rows[0]] * len(rows)]"),
    ("test_abort_frees_everything", "bridges.py", "yield Payload(CODES, word)", ENDLESS),
    ("test_an_unknown_parameter_is_refused_by_name", "plugin.py", '"shout", bool', '"no_such_parameter", int'),
]  # fmt: skip


@pytest.mark.parametrize(("test", "file", "old", "new"), BROKEN, ids=[f"{case[0].removeprefix('test_')}-{case[1]}" for case in BROKEN])
def test_the_contract_notices(test: str, file: str, old: str, new: str, plugin: Plugin, tmp_path: Path) -> None:
    broken = plugin.copy(tmp_path)
    broken.change(file, old, new)
    ran = broken.test("-k", test)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed" in ran.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My Model", "Try 'my-model'"), ("9lives", "Try 'lives'"), ("a--b", "Try 'a-b'"), ("", "no plugin name"), ("../up", "Try 'up'"),
        ("vllm-omni-x", "Leave out the prefix"), ("platforms", "vllm_omni_platforms is installed"), ("echo", "vllm_omni_echo is installed"),
    ],
)  # fmt: skip
def test_a_bad_name_is_refused_and_nothing_written(name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", name, "--dir", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("x")
    assert main(["new-plugin", "mine", "--dir", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
