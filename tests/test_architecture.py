"""The borders of DESIGN.md hold, each rule bites, and what must start light does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "ci"))
import borders

HEAVY = ("torch", "vllm", "transformers", "numpy", "fastapi", "zmq", "msgspec")

BAD = [
    ("direction", "vllm_omni/payload.py", "import vllm_omni.orchestrator"),
    ("direction", "vllm_omni/graph.py", "def f():\n    from vllm_omni.serving.chat import router"),
    ("direction", "vllm_omni/connectors/shm.py", "from vllm_omni import omni"),
    ("direction", "vllm_omni/novelty.py", ""),
    ("direction", "vllm_omni/engine.py", "from .errors import OmniError"),
    ("direction", "vllm_omni/recipe.py", "import vllm_omni_platforms.cpu"),
    ("light", "vllm_omni/payload.py", "def f():\n    import torch"),
    ("light", "vllm_omni/graph.py", "import numpy as np"),
    ("light", "vllm_omni/cli/main.py", "import fastapi"),
    ("light", "vllm_omni/cli/serve.py", "from vllm_omni.serving import app"),
    ("light", "vllm_omni/discovery.py", "try:\n    from transformers import AutoConfig\nexcept ImportError:\n    pass"),
    ("vllm_internals", "vllm_omni/engines/ar.py", "from vllm.v1.engine import core"),
    ("vllm_internals", "vllm_omni/kit/attention.py", "import vllm.engine"),
    ("vllm_internals", "vllm_omni/omni.py", "import_module('vllm.v1.worker')"),
    ("family_names", "vllm_omni/settle.py", "model = 'Qwen3-Omni'"),
    ("family_names", "vllm_omni/settle.py", "# as echo does"),
    ("device_names", "vllm_omni/engines/one_shot.py", "if device.is_npu(): pass"),
    ("device_names", "vllm_omni/engines/one_shot.py", "device = 'cuda:0'"),
    ("pickles", "vllm_omni/connectors/post.py", "import pickle"),
    ("pickles", "vllm_omni/connectors/post.py", "from multiprocessing import Queue"),
    ("pickles", "vllm_omni/connectors/post.py", "socket.send_pyobj(x)"),
    ("pickles", "vllm_omni/connectors/post.py", "load(path, allow_pickle=True)"),
    ("patches", "vllm_omni/compat/lines.py", "import vllm\nvllm.envs.X = 1"),
    ("patches", "vllm_omni/compat/lines.py", "from vllm.config import VllmConfig\ndef f():\n    VllmConfig.check = None"),
    ("patches", "vllm_omni/compat/lines.py", "setattr(module, 'name', value)"),
    ("patches", "vllm_omni/compat/lines.py", "import sys\nsys.modules['x'] = y"),
    ("patches", "vllm_omni/compat/lines.py", "from vllm.config import VllmConfig\nVllmConfig.__dict__['x'] = y"),
    ("patches", "vllm_omni/compat/lines.py", "mock.patch('a.b')"),
    ("length", "vllm_omni/omni.py", "x = 1\n" * 401),
    ("docstring", "vllm_omni/omni.py", "x = 1"),
    ("broad_except", "vllm_omni/omni.py", "def f():\n    try: g()\n    except Exception: pass"),
    ("broad_except", "vllm_omni/omni.py", "try: g()\nexcept: pass"),
    ("broad_except", "vllm_omni/omni.py", "try: g()\nexcept (ValueError, BaseException): pass"),
    ("reexports", "vllm_omni/api.py", '"""Re-exports."""\ndef f(): pass'),
    ("plugin_imports", "model_plugins/echo/plugin.py", "from vllm_omni.orchestrator import Orchestrator"),
    ("plugin_imports", "model_plugins/echo/plugin.py", "from vllm_omni import Omni"),
    ("plugin_imports", "model_plugins/echo/plugin.py", "import vllm_omni_qwen3_omni.vocoder"),
    ("plugin_imports", "model_plugins/echo/plugin.py", "import vllm_omni_platforms.cpu"),
]

GOOD = [
    ("direction", "vllm_omni/graph.py", "from vllm_omni.errors import OmniError"),
    ("direction", "vllm_omni/cli/main.py", "from vllm_omni import __version__"),
    ("light", "vllm_omni/cli/serve.py", "def serve():\n    import uvicorn"),
    ("light", "vllm_omni/omni.py", "import numpy"),
    ("vllm_internals", "vllm_omni/kit/attention.py", "from vllm.model_executor.layers import linear"),
    ("vllm_internals", "vllm_omni/compat/lines.py", "import vllm.v1"),
    ("family_names", "vllm_omni/serving/audio.py", "influx = 1"),
    ("device_names", "vllm_omni/recipe.py", "device = 'cpu'; ship = relationship"),
    ("broad_except", "vllm_omni/omni.py", "try: g()\nexcept BaseException:\n    h()\n    raise"),
    ("patches", "vllm_omni/graph.py", "object.__setattr__(self, 'stages', ())"),
    ("patches", "vllm_omni/graph.py", "import zmq\nsocket = zmq.Socket()\nsocket.linger = 0"),
    ("plugin_imports", "model_plugins/echo/speaker.py", "from vllm_omni_echo.plugin import PITCH\nimport numpy\nimport vllm_omni.api"),
]


@pytest.mark.parametrize("rule", borders.RULES)
def test_every_rule_has_a_bad_sample(rule: str) -> None:
    assert rule in {name for name, _, _ in BAD}


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_rule_bites(rule: str, path: str, source: str) -> None:
    assert list(borders.RULES[rule](borders.File(path, source)))


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_a_rule_lets_pass(rule: str, path: str, source: str) -> None:
    assert not list(borders.RULES[rule](borders.File(path, source)))


def test_the_code_keeps_to_its_borders() -> None:
    assert [str(fault) for fault in borders.faults()] == []


def test_the_tree_is_really_read() -> None:
    paths = {file.path for file in borders.files(borders.ROOT, "vllm_omni", "platforms", "model_plugins")}
    assert {"vllm_omni/graph.py", "platforms/detect.py", "model_plugins/echo/plugin.py"} <= paths


def test_faults_reach_the_exit(tmp_path: Path) -> None:
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni/graph.py").write_text("x = 1\n" * (borders.CORE_BUDGET + 1))
    messages = " ".join(fault.message for fault in borders.faults(tmp_path))
    assert "code lines" in messages and "docstring" in messages


def test_every_broad_except_that_is_listed_exists() -> None:
    found = {f"{file.path}::{name}" for file in borders.files(borders.ROOT, "vllm_omni", "platforms") for name, _ in borders.handlers(file)}
    assert set(borders.BROAD_EXCEPT) <= found


def test_code_lines_counts_code_only() -> None:
    source = '"""Doc.\n\nMore."""\n\n# comment\nx = [\n    1,  # one\n]\n\n\ndef f():\n    """Doc."""\n    return "a\\nb"\n'
    assert borders.code_lines(source) == 5


@pytest.mark.parametrize("command", [["--help"], ["models"], ["models", "--json"]], ids=" ".join)
def test_a_command_starts_light(command: list[str]) -> None:
    code = f"import sys; from vllm_omni.cli.main import main; sys.argv = ['vllm-omni', *{command!r}]\ntry: main()\nexcept SystemExit: pass"
    assert loaded(code) == set()


@pytest.mark.parametrize("module", ["vllm_omni", "vllm_omni.api", "vllm_omni.platform"])
def test_a_module_is_light(module: str) -> None:
    assert loaded(f"import {module}") == set()


def test_weight_is_noticed() -> None:
    assert loaded("import numpy") == {"numpy"}


def loaded(code: str) -> set[str]:
    """The heavy modules a fresh interpreter has after running `code`."""
    script = textwrap.dedent(code) + f"\nimport sys; print('LOADED', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split()[1:])
