"""The command line as a user meets it: in a process of its own, beside broken plugins, with wrong words, and light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tiny import PLUGIN, SPEAKING, STAGES, VLLM, checkpoint, command, distribution, forget, vllm_omni

import vllm_omni as core
from vllm_omni.cli.main import main

HEAVY = ("torch", "vllm", "transformers", "numpy", "fastapi", "zmq", "msgspec", "huggingface_hub")
CPU = {"VLLM_OMNI_TARGET_DEVICE": "cpu"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A path with two good plugins."""
    distribution(tmp_path, "tiny-one", models=["one"], aliases=["uno"], files={"default.yaml": "defaults: {speed: 2}"})
    distribution(tmp_path, "tiny-spoken", aliases=["dos"], plugin=VLLM)
    return tmp_path


@pytest.fixture
def broken(site: Path) -> Path:
    """The same path with plugins that cannot be used: one raises, one fits no version, two clash."""
    distribution(site, "tiny-broken", models=["three"], plugin="import no_such_module")
    distribution(site, "tiny-late", models=["four"], requires=["vllm-omni>=99"])
    for name in ("tiny-a", "tiny-b"):
        distribution(site, name, models=["five"])
    return site


@pytest.mark.parametrize(
    "words", ["--help", "serve --help", "generate --help", "models", "models --json", "graph uno", "serve uno --dry-run"]
)
def test_a_command_starts_light(site: Path, words: str) -> None:
    code = f"""
import sys
from vllm_omni.cli.main import main
try:
    main({words.split()!r})
except SystemExit:
    pass
print("LOADED", *sys.modules)
"""
    result = command("-c", code, path=site)
    *shown, loaded = result.stdout.splitlines()
    assert len(shown) > 1, result.stderr
    assert not set(HEAVY) & set(loaded.split())


def test_help_names_every_command() -> None:
    shown = vllm_omni("--help").stdout
    for name in ("serve", "generate", "models", "graph", "new-plugin"):
        assert f"\n    {name} " in shown or f"\n    {name}\n" in shown
    assert vllm_omni("--version").stdout == f"vllm-omni {core.__version__}\n"


def test_the_installed_command_is_this_one() -> None:
    script = Path(sys.executable).with_name("vllm-omni")
    if not script.exists():
        pytest.skip("the core is not installed in this environment")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout == f"vllm-omni {core.__version__}\n"


def test_models_are_listed_beside_broken_ones(broken: Path) -> None:
    result = vllm_omni("models", path=broken)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["NAME", "DISTRIBUTION", "VERSION", "ALIASES", "TAKES", "GIVES", "GRAPHS", "MATURITY", "LICENCE"]
    rows = {line.split()[1]: line.split() for line in lines if "tiny-" in line and not line.startswith(("Plugin", "'"))}
    assert rows["tiny-one"] == ["one", "tiny-one", "1.0", "uno", "text", "text,audio", "full,text_only", "experimental", "MIT"]
    assert rows["tiny-broken"] == ["three", "tiny-broken", "1.0", "-", "-", "-", "-", "broken", "-"]
    assert "Plugin 'three' of tiny-broken 1.0 is broken: ModuleNotFoundError: No module named 'no_such_module'" in lines
    assert any("tiny-late 1.0 needs vllm-omni>=99" in line for line in lines)


def test_models_as_json(broken: Path) -> None:
    rows = {row["distribution"]: row for row in json.loads(vllm_omni("models", "--json", path=broken).stdout)}
    assert rows["tiny-one"] == {
        "name": "one", "names": ["one"], "aliases": ["uno"], "distribution": "tiny-one", "version": "1.0", "takes": ["text"],
        "gives": ["text", "audio"], "graphs": ["full", "text_only"], "maturity": "experimental", "licence": "MIT", "summary": "tiny",
        "error": None,
    }  # fmt: skip
    errors = {name: row["error"] for name, row in rows.items() if row["error"]}
    assert set(errors) == {"tiny-broken", "tiny-late", "tiny-a", "tiny-b"}
    assert "'five' is claimed by" in errors["tiny-a"] == errors["tiny-b"]
    assert {rows[name]["maturity"] for name in errors} == {"broken"}


def test_other_commands_work_beside_broken_plugins(broken: Path) -> None:
    assert vllm_omni("graph", "uno", path=broken).returncode == 0
    assert vllm_omni("serve", "uno", "--dry-run", path=broken, **CPU).returncode == 0


def test_no_plugin_is_no_error() -> None:
    without = "sys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]"
    code = f"import sys, vllm_omni.cli.models\nfrom vllm_omni.cli.main import main\n{without}\nsys.exit(main(['models']))"
    result = command("-c", code)
    assert (result.returncode, result.stdout) == (0, "No model plugin is installed.\n"), result.stderr


# ---- graph


def test_a_graph_as_text(site: Path) -> None:
    assert vllm_omni("graph", "uno", path=site).stdout == (
        "graph full: takes text; gives text, audio\n"
        "\nstages\n"
        "  talker  OneShot nowhere:Talker\n"
        "  singer  OneShot nowhere:Singer\n"
        "\nflows\n"
        "  request -> talker   text: str\n"
        "  talker -> singer    codes: int64 [frames]\n"
        "  talker -> response  text: str\n"
        "  singer -> response  audio: float32 [samples] in -1..1, meta rate in Hz\n"
        "\na client may set\n"
        "  voice  low | high, default low\n"
        "  seed   int\n"
        "  speed  float, from 0.5, default 1.0\n"
        "\na recipe may set\n"
        "  talker.max_batch  int, from 1, default 8  rows that may share a call\n"
        "  talker.rate       int, default 16000\n"
        "  talker.label      str\n"
        "  talker.table      dict\n"
        "  singer.max_batch  int, from 1, default 4  rows that may share a call\n"
    )
    assert vllm_omni("graph", "uno", "--graph", "text_only", path=site).stdout.startswith("graph text_only: takes text; gives text\n")


def test_a_graph_as_a_chart(tmp_path: Path) -> None:
    joined = PLUGIN.replace("Edge(talker, singer, CODES)", 'Edge(talker, singer, CODES, bridge="a.b:c", optional=True)')
    distribution(tmp_path, "tiny-one", aliases=["uno"], plugin=joined.replace("int64 [frames]", "int64 <n & m>"))
    lines = vllm_omni("graph", "uno", "--mermaid", path=tmp_path).stdout.splitlines()
    assert lines[0] == "flowchart LR"
    assert '  talker_["talker<br/>OneShot"]' in lines
    assert '  request_ -->|"text: str"| talker_' in lines
    assert '  talker_ -.->|"codes: int64 &lt;n &amp; m&gt;<br/>bridge a.b:c<br/>optional"| singer_' in lines
    assert '  singer_ -->|"audio: float32 [samples] in -1..1, meta rate in Hz"| response_' in lines


# ---- serve --dry-run


def test_a_dry_run_says_where_each_value_comes_from(site: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("stages: {singer: {replicas: 2}}")
    words = ["serve", "uno", "--dry-run", "--recipe", "my.yaml", "--set", "talker.args.label=a b", "--served-model-name", "mine"]
    result = vllm_omni(*words, path=site, cwd=tmp_path, **CPU)
    assert (result.returncode, result.stderr) == (0, "")
    lines = {line.strip() for line in result.stdout.splitlines()}
    told = {tuple(part.strip() for part in line.split("  # ")) for line in lines if "  # " in line}
    assert {
        ("model: uno", "command line"), ("graph: full", "declared"), ("device: cpu", "detected"), ("replicas: 2", "my.yaml"),
        ("label: a b", "--set"), ("speed: 2.0", "tiny_one/default.yaml"), ("voice: low", "declared"), ("window: 32MiB", "declared"),
    } <= told  # fmt: skip
    assert "# plugin tiny (tiny_one), served as 'mine'" in lines


def test_what_a_dry_run_prints_is_a_recipe(site: Path, tmp_path: Path) -> None:
    words = ["--set", "talker.vllm.hf_overrides={a: {b: [1, x]}}", "--set", "talker.vllm.hf_overrides.a.c='1'", "--max-model-len", "4096"]
    first = vllm_omni("serve", "dos", *words, "--enforce-eager", "--no-async-scheduling", "-tp", "2", "--dry-run", path=site, **CPU)
    (tmp_path / "again.yaml").write_text(first.stdout)
    again = vllm_omni("serve", "dos", "--dry-run", "--recipe", "again.yaml", path=site, cwd=tmp_path, **CPU)

    told = yaml.safe_load(first.stdout)
    assert yaml.safe_load(again.stdout) == told, again.stderr
    assert told["stages"]["talker"]["vllm"] == {
        "hf_overrides": {"a": {"b": [1, "x"], "c": "1"}}, "max_model_len": 4096, "enforce_eager": True, "async_scheduling": False,
        "tensor_parallel_size": 2,
    }  # fmt: skip
    assert "max_model_len: 4096" in first.stdout
    assert "# --max-model-len" in first.stdout
    assert "checked by vLLM when it starts" in first.stdout


def test_a_dry_run_reads_a_folder(site: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", config={"model_type": "one", "needs": "text_only"})
    result = vllm_omni("serve", "model", "--dry-run", path=site, cwd=tmp_path, **CPU)
    assert [line.split() for line in result.stdout.splitlines()][2] == ["graph:", "text_only", "#", "checkpoint"]


def test_a_foreign_core_is_told(site: Path) -> None:
    distribution(site, "omni-fork", "3.0", plugin=None)
    (site / "omni_fork-3.0.dist-info/RECORD").write_text("vllm_omni/__init__.py,,\n")
    result = vllm_omni("serve", "uno", "--dry-run", path=site, **CPU)
    assert result.returncode == 0
    assert result.stderr.startswith("vllm-omni: warning: The distribution omni-fork 3.0 brings another 'vllm_omni'")
    assert result.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error(site: Path) -> None:
    reader, writer = os.pipe()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    os.close(reader)
    command = [sys.executable, "-m", "vllm_omni", "graph", "uno"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


# ---- generate


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A path with a plugin that runs, and some files to send."""
    distribution(tmp_path, "tiny-real", aliases=["real"], plugin=SPEAKING, files={"stages.py": STAGES})
    (tmp_path / "more.txt").write_text("more")
    return tmp_path


def test_text_goes_to_stdout_and_the_rest_to_files(real: Path) -> None:
    words = ["real", "hi", "--param", "times=2", "--input", "more.txt", "--modality", "text", "-o", "a.WAV", "-o", "b.png"]
    result = vllm_omni("generate", *words, path=real, cwd=real, **CPU)
    assert (result.returncode, result.stdout) == (0, "hi! hi! more! more! \n"), result.stderr
    with wave.open(str(real / "a.WAV")) as sound:
        assert (sound.getnframes(), sound.getframerate(), sound.getnchannels()) == (4 * 800, 8_000, 1)
    assert sorted(path.name for path in real.glob("b*.png")) == ["b-2.png", "b-3.png", "b-4.png", "b.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in real.glob("b*.png"))
    assert "wrote a.WAV: 0.4 s of sound" in result.stderr
    assert "wrote b-4.png: 3 x 2 pixels" in result.stderr


def test_what_a_file_holds_is_sent(real: Path) -> None:
    vllm_omni("generate", "real", "hi", "-o", "a.flac", "-o", "b.png", path=real, cwd=real, **CPU)
    result = vllm_omni("generate", "real", "hi", "--input", "b.png", "--input", "a.flac", path=real, cwd=real, **CPU)
    assert result.stdout == "hi! image (2, 3, 3)! audio (800,)! \n", result.stderr


def test_a_request_that_fails_is_one_line(real: Path) -> None:
    result = vllm_omni("generate", "real", "hi", "--param", "fail=true", path=real, cwd=real, **CPU)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "vllm-omni: error: it shall not be"
    assert "Traceback" not in result.stderr


# ---- wrong words


@pytest.fixture
def here(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same path in this process, and a current folder with the checkpoint of the plugin that raises."""
    monkeypatch.syspath_prepend(str(broken))
    monkeypatch.chdir(tmp_path)
    for name, value in {**CPU, "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    checkpoint(tmp_path / "three", config={"model_type": "three"})
    yield tmp_path
    forget(tmp_path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "vllm-omni: error: the following arguments are required: COMMAND"),
        (["sreve"], "invalid choice: 'sreve'"),
        (["models", "--jsn"], "vllm-omni models: error: unknown argument '--jsn'. Did you mean '--json'?"),
        (["models", "extra"], "vllm-omni models: error: unknown argument 'extra'."),
        (["serve"], "vllm-omni serve: error: the following arguments are required: MODEL"),
        (["serve", "uno", "--prot=80"], "Did you mean '--port'?"),
        (["serve", "uno", "extra"], "vllm-omni serve: error: unknown argument 'extra'."),
        (["serve", "uno", "--prot", "2"], "unknown argument '--prot'. Did you mean '--port'?"),
        (["serve", "uno", "-xy", "2"], "vllm-omni serve: error: unknown argument '-xy'."),
        (["serve", "--max-model-len", "4096", "uno"], "write MODEL before --max-model-len: '4096' may be the value of that flag."),
        (["serve", "uno", "--port", "many"], "argument --port: invalid int value: 'many'"),
        (["serve", "uno", "--log-level", "loud"], "argument --uvicorn-log-level/--log-level: invalid choice: 'loud'"),
        (["generate", "uno", "hi", "--modality", "sound"], "argument --modality: invalid choice: 'sound'"),
    ],
)
def test_a_wrong_word_is_a_usage_error(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(words)
    shown = capsys.readouterr()
    assert (exit.value.code, shown.out) == (2, "")
    assert complaint in shown.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "umo"], "There is no model 'umo'. Did you mean 'uno'?"),
        (["serve", "uno", "--set", "talker.replicas=0"], "--set: 'stages.talker.replicas' must be at least 1, not 0."),
        (["serve", "uno", "--graph", "ful"], "--graph: Plugin 'tiny' has no graph 'ful'. Did you mean 'full'?"),
        (["serve", "uno", "--plugin", "gone"], "There is no plugin 'gone'."),
        (["serve", "uno", "--recipe", "gone.yaml"], "--recipe: there is neither a file nor a shipped recipe 'gone.yaml'."),
        (["graph", "three"], "Plugin 'three' of tiny-broken 1.0 is broken: ModuleNotFoundError"),
        (["generate", "uno", "hi", "-o", "a.xyz"], "--output a.xyz: a name must end in one of .wav"),
        (["generate", "uno", "hi", "-o", "a.wav", "-o", "b.mp3"], "--output b.mp3: a.wav is for audio already."),
        (["generate", "uno", "hi", "-o", "gone/a.wav"], "--output gone/a.wav: there is no folder gone."),
        (["generate", "uno", "hi", "--modality", "audio"], "Say where the audio goes with --output FILE.wav"),
        (["generate", "uno", "hi", "--modality", "image"], "This model gives text, audio; it cannot give 'image'."),
        (["generate", "uno", "hi", "--param", "voise=low"], "--param: graph 'full' has no parameter 'voise'. Did you mean 'voice'?"),
        (["generate", "uno", "hi", "--param", "voice=deep"], "--param: 'defaults.voice' must be one of low, high, not 'deep'."),
        (["generate", "uno", "hi", "--param", "voice"], "--param voice: write it as NAME=VALUE."),
        (["generate", "uno", "hi", "--input", "gone.png"], "--input gone.png: No such file or directory."),
    ],
)
def test_what_cannot_be_done_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    code = main(words)
    shown = capsys.readouterr()
    assert (code, shown.out) == (1, "")
    assert shown.err.startswith(f"vllm-omni: error: {complaint}")
    assert shown.err.count("\n") == 1


def test_a_process_ends_with_these_codes(site: Path) -> None:
    assert [vllm_omni(*words, path=site).returncode for words in ([], ["graph", "./gone"], ["graph", "uno"])] == [2, 1, 0]


def test_elsewhere_than_on_linux_one_sentence_says_so() -> None:
    code = "import sys\nsys.platform = 'darwin'\nfrom vllm_omni.cli.main import main\nsys.exit(main(['models']))"
    result = command("-c", code)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "vllm-omni: error: vllm-omni runs on Linux only, and this is darwin.\n"


# ---- the door of stock vLLM


STOCK = "import sys\nfrom vllm_omni.entrypoints.cli.main import main\nsys.argv = ['/bin/vllm', *sys.argv[1:]]\nmain()\nprint('came back')"
"""What stock vLLM does when it sees --omni on its command line."""


@pytest.mark.parametrize("words", [["serve", "uno", "--omni", "--dry-run"], ["--omni", "serve", "--dry-run", "uno"]])
def test_the_door_leads_to_the_same_command(site: Path, words: list[str]) -> None:
    through = command("-c", STOCK, *words, path=site, **CPU)
    assert through.stdout == vllm_omni("serve", "uno", "--dry-run", path=site, **CPU).stdout
    assert (through.returncode, through.stderr) == (0, "")


def test_the_door_keeps_arguments_and_exit_codes(site: Path) -> None:
    through = command("-c", STOCK, "serve", "uno", "--omni", "--set", "talker.args.label=a b 'c'", "--dry-run", path=site, **CPU)
    assert "label: a b 'c'" in through.stdout
    assert command("-c", STOCK, "serve", "--omni", path=site).returncode == 2
    assert command("-c", STOCK, "serve", "./gone", "--omni", path=site).returncode == 1


def test_the_door_does_not_open_to_a_folder_of_that_name(site: Path, tmp_path: Path) -> None:
    (tmp_path / "here/vllm_omni").mkdir(parents=True)
    (tmp_path / "here/vllm_omni/__main__.py").write_text("print('the wrong one')")
    found = os.pathsep.join([str(site), str(Path(core.__file__).parents[1])])
    through = command("-P", "-c", STOCK, "models", "--omni", path=Path(found), cwd=tmp_path / "here")
    assert through.stdout.startswith("NAME"), through.stderr
