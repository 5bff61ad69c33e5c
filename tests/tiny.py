"""Tiny real distributions in a folder of the test's, and commands run with that folder on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PLUGIN = """
from vllm_omni.api import AUDIO, IMAGE, TEXT, Edge, Kind, ModelPlugin, OneShot, Param, Stage, StageGraph

CODES = Kind("codes", "int64 [frames]")
talker = Stage("talker", OneShot("nowhere:Talker"), takes=(TEXT,), gives=(TEXT, CODES),
               params=(Param("voice", str, "low", choices=("low", "high")), Param("seed", int), Param("speed", float, 1.0, minimum=0.5)),
               args=(Param("rate", int, 16_000), Param("label", str), Param("table", dict)))
singer = Stage("singer", OneShot("nowhere:Singer", max_batch=4), takes=(CODES,), gives=(AUDIO,))
FULL = StageGraph("full", edges=(Edge(talker, singer, CODES),), outputs={TEXT: talker, AUDIO: singer})
TEXT_ONLY = StageGraph("text_only", stages=(talker,), outputs={TEXT: talker})
PLUGIN = ModelPlugin("tiny", graphs=(FULL, TEXT_ONLY), choose=lambda config: config.get("needs", "full"), licence="MIT", summary="tiny")
"""
"""A declaration of two graphs."""

VLLM = """
from dataclasses import dataclass
from vllm_omni.api import AUDIO, TEXT, Edge, ModelPlugin, OneShot, Stage, StageGraph

@dataclass(frozen=True)
class Engine:
    target: str = "nowhere:Model"
    engine: str = "nowhere:Engine"
    args: tuple = ()
    takes_vllm: bool = True

talker = Stage("talker", Engine(), takes=(TEXT,), gives=(TEXT,), main=True)
singer = Stage("singer", OneShot("nowhere:Singer"), takes=(TEXT,), gives=(AUDIO,))
GRAPH = StageGraph("speaking", edges=(Edge(talker, singer, TEXT),), outputs={TEXT: talker, AUDIO: singer})
PLUGIN = ModelPlugin("spoken", graphs=(GRAPH,))
"""
"""A declaration whose main stage runs on vLLM."""


def distribution(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    models: Mapping[str, str] | Iterable[str] = (),
    aliases: Mapping[str, str] | Iterable[str] = (),
    claims: Mapping[str, str] | None = None,
    requires: Iterable[str] = (),
    extras: Iterable[str] = (),
    files: Mapping[str, str] | None = None,
    plugin: str | None = PLUGIN,
) -> str:
    """Write a distribution into `folder`, and its package unless `plugin` is None. Returns the package's name.

    Names without a value stand for the package's PLUGIN; `files` are further files of the package.
    """
    package = name.replace("-", "_")
    value = f"{package}.plugin:PLUGIN"
    groups = {"models": models, "aliases": aliases, "claims": claims or {}}
    entries = ""
    for group, names in groups.items():
        pairs = names if isinstance(names, Mapping) else dict.fromkeys(names, value)
        entries += f"[vllm_omni.{group}]\n" + "".join(f"{entry} = {target}\n" for entry, target in pairs.items())
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    metadata += [f"Provides-Extra: {extra}" for extra in extras]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(metadata) + "\n")
    (info / "entry_points.txt").write_text(entries)
    if plugin is not None:
        (folder / package).mkdir()
        for file, text in {"__init__.py": "", "plugin.py": plugin, **(files or {})}.items():
            (folder / package / file).write_text(text)
    return package


def checkpoint(folder: Path, **files: object) -> Path:
    """A folder with these JSON files: `config={...}` is config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def forget(folder: Path) -> None:
    """Make Python forget what it imported from `folder`."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def command(*args: str, path: Path | None = None, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python ARGS` in a process of its own with `path` first on its path."""
    known = [str(path) if path else "", os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, known)), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=cwd, timeout=60, check=False)


def vllm_omni(*args: str, path: Path | None = None, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """`vllm-omni ARGS` in a process of its own."""
    return command("-m", "vllm_omni", *args, path=path, cwd=cwd, **environ)


SPEAKING = """
from vllm_omni.api import AUDIO, IMAGE, TEXT, ModelPlugin, OneShot, Param, Stage, StageGraph

PARAMS = (Param("times", int, 1), Param("fail", bool))
stage = Stage("all", OneShot("tiny_real.stages:All"), takes=(TEXT, IMAGE, AUDIO), gives=(TEXT, AUDIO, IMAGE), params=PARAMS)
PLUGIN = ModelPlugin("real", graphs=(StageGraph("real", stages=(stage,), outputs={TEXT: stage, AUDIO: stage, IMAGE: stage}),))
"""
"""The declaration of `tiny-real`, which runs."""

STAGES = """
import numpy as np
from vllm_omni.api import OneShotModule, RequestError, audio, image, text

class All(OneShotModule):
    def open(self, job):
        if job.params.get("fail"):
            raise RequestError("it shall not be")
        return job

    def run(self, rows):
        return [self.answer(job, chunk) for job, chunk in rows]

    def answer(self, job, chunk):
        said = chunk.data if chunk.kind.name == "text" else f"{chunk.kind} {chunk.data.shape}"
        made = [text(f"{said}! ") for _ in range(job.params["times"])]
        made += [audio(np.full(800, 0.5, np.float32), 8_000), image(np.zeros((2, 3, 3), np.uint8))] * job.params["times"]
        return [each for each in made if each.kind in job.wants]
"""
"""Its one stage: repeats what it was given, `times` times, with a tone and a picture each."""
