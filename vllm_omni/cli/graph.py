"""`vllm-omni graph MODEL`: a model's stages, what flows on each edge, and what may be set. Fetches no weights.

As text, or the stages and edges as a Mermaid chart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape

from vllm_omni.cli.model import add_source, deploy
from vllm_omni.graph import StageGraph
from vllm_omni.param import Param
from vllm_omni.payload import PUBLIC_KINDS, Kind

OPTIONAL = "optional"
MANY = 2**31 - 1
"""A bound that is only there because numbers have ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")


def run(args: argparse.Namespace) -> int:
    graph = deploy(args, weights=False).graph
    print("\n".join(mermaid(graph) if args.mermaid else text(graph)))
    return 0


def text(graph: StageGraph) -> Iterator[str]:
    """One line a stage, one an edge, one an input and an output, one a parameter."""
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
    for title, named in (
        ("a client may set", [(param.name, param) for stage in graph.stages for param in stage.params]),
        ("a recipe may set", [(f"{stage.name}.{arg.name}", arg) for stage in graph.stages for arg in stage.all_args]),
    ):
        if named:
            yield f"\n{title}"
            shown = {name: (_allowed(param), param.help) for name, param in named}
            columns = [max(map(len, shown)), min(max(len(allowed) for allowed, _ in shown.values()), 50)]
            yield from (f"  {name:{columns[0]}}  {allowed:{columns[1]}}  {said}".rstrip() for name, (allowed, said) in shown.items())


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


def _allowed(param: Param) -> str:
    """Its choices or type, its bounds, and its default."""
    yes = [" | ".join(map(str, param.choices)) or (f"list of {param.items}" if param.items else param.type.__name__)]
    yes += [f"from {param.minimum}"] if param.minimum is not None and param.minimum > -MANY else []
    yes += [f"up to {param.maximum}"] if param.maximum is not None and param.maximum < MANY else []
    yes += [f"default {param.default}"] if param.default is not None else []
    return ", ".join(yes)


def _shown(kind: Kind) -> str:
    return f"{kind.name}: {kind.shape}" if kind.shape else kind.name
