"""A stage graph is refused when it is built, all faults at once; a route is the part of it that one request uses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from vllm_omni.errors import GraphError, PluginError, RequestError
from vllm_omni.graph import Edge, OneShot, Stage, StageGraph
from vllm_omni.param import Param
from vllm_omni.payload import AUDIO, IMAGE, PROGRESS, TEXT, VIDEO, Kind
from vllm_omni.plugin import ModelPlugin

CODES, MOOD = Kind("codes", "int64 [frames]"), Kind("mood")


def stage(name: str, takes: Any, gives: Any, **fields: Any) -> Stage:
    return Stage(name, OneShot(f"nowhere:{name}"), takes=takes, gives=gives, **fields)


reader = stage("reader", (TEXT,), (TEXT, CODES), main=True)
looker = stage("looker", (IMAGE,), (MOOD,))
singer = stage("singer", (CODES, MOOD), (AUDIO,))
painter = stage("painter", (CODES, MOOD), (IMAGE,))
FULL = StageGraph(
    "full",
    edges=(
        Edge(reader, singer, CODES),
        Edge(looker, singer, MOOD, optional=True),
        Edge(reader, painter, CODES, bridge="b:join"),
        Edge(looker, painter, MOOD, bridge="b:join"),
    ),
    outputs={TEXT: reader, AUDIO: singer, IMAGE: painter},
)  # fmt: skip


def test_stages_come_in_an_order_that_respects_the_edges() -> None:
    backwards = StageGraph("g", edges=tuple(reversed(FULL.edges)), outputs=FULL.outputs, stages=(singer, painter, looker, reader))
    for graph in (FULL, backwards):
        names = [each.name for each in graph.stages]
        assert sorted(names) == ["looker", "painter", "reader", "singer"]
        assert all(names.index(edge.source.name) < names.index(edge.target.name) for edge in graph.edges)


def test_what_a_graph_is_asked() -> None:
    assert FULL.stage("singer") is singer
    assert FULL.incoming(singer) == FULL.edges[:2]
    assert set(FULL.entries) == {reader, looker}
    assert set(FULL.takes) == {TEXT, IMAGE}
    assert FULL.main is reader
    assert [(edge.key, edge.name, edge.id) for edge in FULL.edges[:1]] == [("reader.codes", "reader->singer", "reader.codes->singer")]
    with pytest.raises(KeyError):
        FULL.stage("nobody")
    with pytest.raises(FrozenInstanceError):
        FULL.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fault", "edges", "outputs", "stages"),
    [
        ("Stages a -> b -> a form a cycle.", [("a", "b", CODES), ("b", "a", CODES)], {TEXT: "a"}, []),
        ("Two different stages are named 'a'.", [], {TEXT: "a"}, ["a", "a2"]),
        ("Stage name 'not a name' is not an identifier.", [], {TEXT: "odd"}, ["odd"]),
        ("Stage 'stringly' names the unknown kind 'text'", [], {AUDIO: "stringly"}, ["stringly"]),
        ("Edge a->b carries the unknown kind 'mood': 'a' does not give it.", [("a", "b", MOOD)], {TEXT: "b"}, []),
        ("Edge a->deaf carries the unknown kind 'codes': 'deaf' does not take it and no bridge changes it.", [("a", "deaf", CODES)],
         {TEXT: "deaf"}, []),
        ("Edge a.codes->b is declared twice.", [("a", "b", CODES), ("a", "b", CODES)], {TEXT: "b"}, []),
        ("The graph has no output.", [], {}, ["a"]),
        ("Output 'codes' is an unknown kind to clients; outputs are text, image, audio, video, action, progress.", [], {CODES: "a"}, ["a"]),
        ("Output 'text' comes from 'b', which is not in the graph.", [], {TEXT: "b"}, ["a"]),
        ("Output 'audio' is missing: stage 'a' does not give it.", [], {AUDIO: "a"}, ["a"]),
        ("Stage 'b' is unreachable: nothing it gives arrives at an output.", [("a", "b", CODES)], {TEXT: "a"}, []),
        ("Stage 'inner' is unreachable: no edge feeds it and it takes nothing a client can send.", [], {TEXT: "inner"}, ["inner"]),
        ("More than one stage is the main one.", [("a", "b", CODES)], {TEXT: "b"}, []),
    ],
)  # fmt: skip
def test_an_unsound_graph_is_refused(fault: str, edges: list[tuple[str, str, Kind]], outputs: dict[Kind, str], stages: list[str]) -> None:
    main = "main" in fault
    known = {
        "a": stage("a", (TEXT, CODES), (TEXT, CODES), main=main), "b": stage("b", (TEXT, CODES, MOOD), (TEXT, CODES), main=main),
        "a2": stage("a", (TEXT,), (TEXT,)), "odd": stage("not a name", (TEXT,), (TEXT,)), "deaf": stage("deaf", (TEXT,), (TEXT,)),
        "inner": stage("inner", (CODES,), (TEXT,)), "stringly": stage("stringly", ("text",), (AUDIO,)),
    }  # fmt: skip
    with pytest.raises(GraphError) as error:
        StageGraph(
            "g", tuple(Edge(known[source], known[target], kind) for source, target, kind in edges),
            {kind: known[name] for kind, name in outputs.items()}, tuple(known[name] for name in stages),
        )  # fmt: skip
    assert fault in str(error.value)


def test_all_faults_are_told_at_once() -> None:
    deaf = stage("deaf", (TEXT,), ())
    with pytest.raises(GraphError) as error:
        StageGraph("g", edges=(Edge(reader, deaf, MOOD),), outputs={AUDIO: reader})
    assert str(error.value) == (
        "Graph 'g': Edge reader->deaf carries the unknown kind 'mood': 'reader' does not give it. "
        "Edge reader->deaf carries the unknown kind 'mood': 'deaf' does not take it and no bridge changes it. "
        "Output 'audio' is missing: stage 'reader' does not give it. "
        "Stage 'deaf' is unreachable: nothing it gives arrives at an output."
    )


def test_a_bridge_may_change_the_kind() -> None:
    deaf = stage("deaf", (VIDEO,), (TEXT,))
    assert StageGraph("g", edges=(Edge(reader, deaf, CODES, bridge="b:c"),), outputs={TEXT: deaf}).stages == (reader, deaf)


@pytest.mark.parametrize(
    ("wanted", "given", "stages", "edges"),
    [
        ([], [TEXT], ["reader"], 0),
        ([TEXT], [TEXT], ["reader"], 0),
        ([AUDIO], [TEXT], ["reader", "singer"], 1),
        ([AUDIO], [TEXT, IMAGE], ["looker", "reader", "singer"], 2),
        ([IMAGE], [TEXT, IMAGE], ["looker", "painter", "reader"], 2),
        ([TEXT, AUDIO, AUDIO], [TEXT], ["reader", "singer"], 1),
        ([AUDIO, IMAGE], [TEXT, IMAGE], ["looker", "painter", "reader", "singer"], 4),
    ],
)
def test_a_route_is_what_the_request_uses(wanted: list[Kind], given: list[Kind], stages: list[str], edges: int) -> None:
    route = FULL.route(wanted, given)
    assert sorted(each.name for each in route.stages) == stages
    assert len(route.edges) == edges
    assert list(route.outputs) == list(dict.fromkeys(wanted or [TEXT]))


@pytest.mark.parametrize(
    ("wanted", "given", "complaint"),
    [
        ([VIDEO], [TEXT], "This model gives text, audio, image; it cannot give 'video'."),
        ([TEXT], [TEXT, VIDEO], "it cannot take 'video'."),
        ([IMAGE], [TEXT], "Making 'image' needs an input this request lacks."),
        ([AUDIO], [IMAGE], "Making 'audio' needs an input this request lacks."),
        ([TEXT], [], "Making 'text' needs an input this request lacks."),
    ],
)
def test_a_request_without_a_route_is_refused(wanted: list[Kind], given: list[Kind], complaint: str) -> None:
    with pytest.raises(RequestError) as error:
        FULL.route(wanted, given)
    assert complaint in str(error.value)
    assert error.value.param in ("messages", "modalities")


def test_progress_is_told_where_there_is_some() -> None:
    painter, singer = stage("painter", (TEXT,), (IMAGE, PROGRESS)), stage("singer", (TEXT,), (AUDIO,))
    graph = StageGraph("g", outputs={IMAGE: painter, AUDIO: singer, PROGRESS: painter}, stages=(painter, singer))
    assert list(graph.route((IMAGE, PROGRESS), [TEXT]).outputs) == [IMAGE, PROGRESS]
    assert list(graph.route((PROGRESS,), [TEXT]).outputs) == [IMAGE, PROGRESS]
    assert list(graph.route((AUDIO, PROGRESS), [TEXT]).outputs) == [AUDIO]
    assert list(graph.route((IMAGE,), [TEXT]).outputs) == [IMAGE]


def test_a_graph_without_text_gives_the_first_that_it_names_by_default() -> None:
    camera = stage("camera", (TEXT,), (IMAGE, AUDIO))
    graph = StageGraph("g", outputs={IMAGE: camera, AUDIO: camera}, stages=(camera,))
    assert list(graph.route((), [TEXT]).outputs) == [IMAGE]


def test_an_optional_edge_is_left_out_with_its_source() -> None:
    route = FULL.route([AUDIO], [TEXT])
    assert [edge.id for edge in route.edges] == ["reader.codes->singer"]


def test_a_stage_with_only_optional_edges_needs_one_of_them() -> None:
    either = stage("either", (CODES, MOOD), (AUDIO,))
    edges = (Edge(reader, either, CODES, optional=True), Edge(looker, either, MOOD, optional=True))
    graph = StageGraph("g", edges=edges, outputs={AUDIO: either})
    assert [each.name for each in graph.route([AUDIO], [IMAGE]).stages] == ["looker", "either"]
    with pytest.raises(RequestError):
        graph.route([AUDIO], [])


def test_parameters_and_arguments_are_gathered() -> None:
    talker = stage("talker", (TEXT,), (TEXT,), params=(Param("voice", str),), args=(Param("rate", int),))
    graph = StageGraph("g", outputs={TEXT: talker}, stages=(talker,))
    assert list(graph.params) == ["voice"]
    assert [param.name for param in talker.all_args] == ["max_batch", "rate"]


def test_a_plugin_chooses_among_its_graphs() -> None:
    small = StageGraph("small", outputs={TEXT: reader}, stages=(reader,))
    plugin = ModelPlugin("p", graphs=(FULL, small), choose=lambda config: str(config.get("size", "small")))
    assert plugin.graph_for({}) is small
    assert ModelPlugin("p", graphs=(FULL, small)).graph_for({"size": "small"}) is FULL
    with pytest.raises(PluginError, match=r"Plugin 'p' has no graph 'smal'. Did you mean 'small'\?"):
        plugin.graph("smal")
    with pytest.raises(PluginError, match="Plugin 'p' declares no graph"):
        ModelPlugin("p", graphs=())
