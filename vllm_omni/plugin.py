"""All that the core knows of a model family, as data. Finding installed plugins is `discovery.py`'s work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni.errors import PluginError, did_you_mean
from vllm_omni.graph import StageGraph


@dataclass(frozen=True, slots=True)
class ModelPlugin:
    """A model family.

    `choose(config)` names the graph a checkpoint needs, from its `config.json` or `model_index.json` ({} for a model without
    weights); without it the first graph is taken. `licence` is that of the weights. Its default recipe is the file `default.yaml`
    beside the declaration.
    """

    name: str
    graphs: tuple[StageGraph, ...]
    choose: Callable[[Mapping[str, Any]], str] | None = None
    summary: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if not self.graphs:
            raise PluginError(f"Plugin '{self.name}' declares no graph.")

    def graph(self, name: str) -> StageGraph:
        """The graph of that name. Raises PluginError."""
        known = {graph.name: graph for graph in self.graphs}
        if name not in known:
            raise PluginError(f"Plugin '{self.name}' has no graph '{name}'.{did_you_mean(name, known)}", param="graph")
        return known[name]

    def graph_for(self, config: Mapping[str, Any]) -> StageGraph:
        """The graph a checkpoint of this configuration needs."""
        return self.graph(self.choose(config)) if self.choose else self.graphs[0]
