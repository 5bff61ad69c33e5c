"""A plugin that runs whatever language model it is told to on stock vLLM; and a tiny one for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from vllm_omni.api import AR, SAMPLING, TEXT, ModelPlugin, Stage, StageGraph
from vllm_omni.deployment import Deployment
from vllm_omni.recipe import Link, Placement, Recipe

talker = Stage("talker", AR(), takes=(TEXT,), gives=(TEXT,), params=SAMPLING, main=True)
GRAPH = StageGraph("talk", stages=(talker,), outputs={TEXT: talker})
PLUGIN = ModelPlugin("talk", graphs=(GRAPH,))

SMALL: dict[str, Any] = {
    "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 64, "max_num_batched_tokens": 512,
    "dtype": "float32", "use_tqdm_on_load": False,
}  # fmt: skip
"""Engine arguments with which a tiny model starts in a second."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = [f"{word} {'and so on ' * (index % 5)}" for index, word in enumerate("abcdefghijklmnop")]


def stock_answers(model: Path, max_tokens: int) -> dict[str, list[int]]:
    """The tokens that vLLM's own offline interface generates greedily for each prompt, one at a time. In a process of its own."""
    script = Path(__file__).with_name("stock.py")
    asked = json.dumps({"engine": {"model": str(model), **SMALL}, "sampling": {**GREEDY, "max_tokens": max_tokens}, "prompts": PROMPTS})
    ran = subprocess.run([sys.executable, script], input=asked, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return dict(zip(PROMPTS, json.loads(ran.stdout.splitlines()[-1]), strict=True))


def deployment(model: Path, graph: StageGraph = GRAPH, **vllm: Any) -> Deployment:
    """The model with these engine arguments beside the small ones."""
    stages = {stage.name: Placement(vllm={**SMALL, **vllm}) if stage.spec.takes_vllm else Placement() for stage in graph.stages}
    recipe = Recipe(graph.name, stages=stages, edges={edge.name: Link() for edge in graph.edges})
    return Deployment("talk", "talk", ModelPlugin("talk", graphs=(graph,)), "talk", graph, str(model), recipe)


def flags(**settings: Any) -> list[str]:
    """Engine arguments as a command line has them."""
    return [f"--{name.replace('_', '-')}={yaml.safe_dump(value).splitlines()[0]}" for name, value in settings.items()]
