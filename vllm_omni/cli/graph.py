"""`vllm-omni graph MODEL`: a model's stages and what flows on each edge, as text or as a Mermaid chart. Fetches no weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from vllm_omni.cli.model import add_source
from vllm_omni.graph import Edge, StageGraph
from vllm_omni.payload import PUBLIC_KINDS, Kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")


def run(args: argparse.Namespace) -> int:
    from vllm_omni import settle
    from vllm_omni.resolve import resolve

    owner = resolve(args.model, plugin=args.plugin, revision=args.revision, token=args.hf_token)
    graph = settle.choose_graph(owner, args.graph)
    print("\n".join(mermaid(graph) if args.mermaid else text(graph)))
    return 0


def text(graph: StageGraph) -> Iterator[str]:
    """One line a stage, one an edge, one an input and an output."""
    yield f"graph {graph.name}: takes {_names(graph.takes)}; gives {_names(graph.outputs)}"
    yield "\nstages"
    width = max(len(stage.name) for stage in graph.stages)
    for stage in graph.stages:
        main = ", main" if stage.main else ""
        yield f"  {stage.name:{width}}  {type(stage.spec).__name__} {stage.spec.target}{main}"
    yield "\nflows"
    flows = [(f"request -> {stage}", _flow(kind)) for stage, kind in _inputs(graph)]
    flows += [(f"{edge.source.name} -> {edge.target.name}", _flow(edge.kind, edge)) for edge in graph.edges]
    flows += [(f"{giver.name} -> response", _flow(kind)) for kind, giver in graph.outputs.items()]
    width = max(len(ends) for ends, _ in flows)
    for ends, what in flows:
        yield f"  {ends:{width}}  {'; '.join(what)}"


def mermaid(graph: StageGraph) -> Iterator[str]:
    """A flowchart; dotted edges are optional."""
    yield "flowchart LR"
    yield "  request_([request])"
    for stage in graph.stages:
        yield f'  {stage.name}_["{stage.name}<br/>{type(stage.spec).__name__}"]'
    for kind in graph.outputs:
        yield f"  to_{kind.name}([{kind.name}])"
    for name, kind in _inputs(graph):
        yield f"  request_ -->|{_label(_flow(kind))}| {name}_"
    for edge in graph.edges:
        arrow = "-.->" if edge.optional else "-->"
        yield f"  {edge.source.name}_ {arrow}|{_label(_flow(edge.kind, edge))}| {edge.target.name}_"
    for kind, giver in graph.outputs.items():
        yield f"  {giver.name}_ -->|{_label(_flow(kind))}| to_{kind.name}"


def _inputs(graph: StageGraph) -> Iterator[tuple[str, Kind]]:
    return ((stage.name, kind) for stage in graph.entries for kind in stage.takes if kind in PUBLIC_KINDS.values())


def _flow(kind: Kind, edge: Edge | None = None) -> list[str]:
    """A kind with its shape, the bridge that changes it, and whether the edge is optional."""
    parts = [f"{kind.name}: {kind.shape}" if kind.shape else kind.name]
    parts += [f"bridge {edge.bridge}"] if edge and edge.bridge else []
    return [*parts, "optional"] if edge and edge.optional else parts


def _label(parts: list[str]) -> str:
    escaped = (part.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;") for part in parts)
    return f'"{"<br/>".join(escaped)}"'


def _names(kinds: Iterable[Kind]) -> str:
    return ", ".join(kind.name for kind in kinds)
