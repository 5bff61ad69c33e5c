"""A model made ready to run: its plugin, its checkpoint's folder, its graph and its settled recipe. Nothing is started here."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni.graph import StageGraph
from vllm_omni.plugin import ModelPlugin
from vllm_omni.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Deployment:
    """`model` is what the user named, `served_name` what clients call it, `folder` the checkpoint ("" without weights)."""

    model: str
    served_name: str
    plugin: ModelPlugin
    package: str
    graph: StageGraph
    folder: str
    recipe: Recipe
