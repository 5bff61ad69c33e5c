"""`vllm-omni graph MODEL`: a model's stages and what flows on each edge, as text or as a Mermaid chart. Fetches no weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape

from vllm_omni.cli.model import add_source, deploy
from vllm_omni.graph import StageGraph
from vllm_omni.payload import PUBLIC_KINDS, Kind

OPTIONAL = "optional"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")


def run(args: argparse.Namespace) -> int:
    graph = deploy(args, weights=False).graph
    print("\n".join(mermaid(graph) if args.mermaid else text(graph)))
    return 0


def text(graph: StageGraph) -> Iterator[str]:
    """One line a stage, one an edge, one an input and an output."""
    yield f"graph {graph.name}: takes {', '.join(map(str, graph.takes))}; gives {', '.join(map(str, graph.outputs))}"
    yield "\nstages"
    width = max(len(stage.name) for stage in graph.stages)
    for stage in graph.stages:
        main = ", main" if stage.main else ""
        yield f"  {stage.name:{width}}  {type(stage.spec).__name__} {stage.spec.target}{main}"
    yield "\nflows"
    flows = [(f"{source} -> {target}", "; ".join(what)) for source, target, what in _flows(graph)]
    width = max(len(ends) for ends, _ in flows)
    for ends, what in flows:
        yield f"  {ends:{width}}  {what}"


def mermaid(graph: StageGraph) -> Iterator[str]:
    """A flowchart; dotted edges are optional."""
    yield "flowchart LR"
    for end in ("request", "response"):
        yield f"  {end}_([{end}])"
    for stage in graph.stages:
        yield f'  {stage.name}_["{stage.name}<br/>{type(stage.spec).__name__}"]'
    for source, target, what in _flows(graph):
        arrow = "-.->" if OPTIONAL in what else "-->"
        yield f'  {source}_ {arrow}|"{"<br/>".join(map(escape, what))}"| {target}_'


def _flows(graph: StageGraph) -> Iterator[tuple[str, str, list[str]]]:
    """From where to where, and what: a kind with its shape, the bridge that changes it, and whether the edge is optional."""
    for stage in graph.entries:
        yield from (("request", stage.name, [_shown(kind)]) for kind in stage.takes if kind in PUBLIC_KINDS.values())
    for edge in graph.edges:
        bridge = [f"bridge {edge.bridge}"] if edge.bridge else []
        yield edge.source.name, edge.target.name, [_shown(edge.kind), *bridge, *([OPTIONAL] if edge.optional else [])]
    for kind, giver in graph.outputs.items():
        yield giver.name, "response", [_shown(kind)]


def _shown(kind: Kind) -> str:
    return f"{kind.name}: {kind.shape}" if kind.shape else kind.name
