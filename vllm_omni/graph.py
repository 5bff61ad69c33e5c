"""The stages of a model and what flows between them, as data.

A `StageGraph` is checked when it is built, and all its faults are told at once. It names code by dotted name and imports none;
it runs nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, ClassVar

from vllm_omni.errors import GraphError, RequestError
from vllm_omni.param import Param
from vllm_omni.payload import PROGRESS, PUBLIC_KINDS, TEXT, Kind, Payload

Bridge = Callable[[dict[str, AsyncIterator[Payload]], Any], AsyncIterator[Payload]]
"""`async def bridge(inputs, job)`, an async generator that turns the chunks of a stage's inputs into those its engine takes.

`inputs` has one stream per edge of the group, under `Edge.key`; `job` is a `vllm_omni.engine.Job`. Runs in the consumer's process.
"""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine runs a stage, and with what. `engine` and `target` are dotted names (`package.module:Name`).

    An engine that `takes_vllm` takes vLLM's own settings.
    """

    target: str
    engine: ClassVar[str]
    takes_vllm: ClassVar[bool] = False

    @property
    def args(self) -> tuple[Param, ...]:
        """Arguments the engine takes from a recipe, beside the stage's own."""
        return ()


@dataclass(frozen=True, slots=True)
class OneShot(EngineSpec):
    """A stage whose module turns chunks into chunks in one call: codec, VAE, vocoder, encoder, policy head.

    `target` is a `vllm_omni.engine.OneShotModule`; at most `max_batch` rows share a call.
    """

    max_batch: int = 8
    engine: ClassVar[str] = "vllm_omni.engines.one_shot:OneShotEngine"

    @property
    def args(self) -> tuple[Param, ...]:
        return (Param("max_batch", int, self.max_batch, minimum=1, help="rows that may share a call"),)


@dataclass(frozen=True, slots=True)
class Denoise(EngineSpec):
    """A stage that moves samples from noise to data, step by step. `target` is a `vllm_omni.engine.DenoiseModule`.

    Rows share a forward as long as they have at most `budget` tokens together, and beyond that if none of them is slowed more than twofold.
    `memory` is that of `vllm_omni.engine.StageContext`.
    """

    budget: int = 4096
    memory: str = ""
    engine: ClassVar[str] = "vllm_omni.engines.denoise:DenoiseEngine"

    @property
    def args(self) -> tuple[Param, ...]:
        return (
            Param("budget", int, self.budget, minimum=1, help="tokens in a forward that rows of any size may share"),
            Param("memory_gib", float, minimum=0.001, help="memory of the device that jobs may fill (default: 4/5 of what is free)"),
        )


@dataclass(frozen=True, slots=True)
class AR(EngineSpec):
    """A stage that generates token by token, on vLLM. `target` is a `vllm_omni.engine.ARModule`: by default a language model."""

    target: str = "vllm_omni.engine:ARModule"
    engine: ClassVar[str] = "vllm_omni.engines.ar:AREngine"
    takes_vllm: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A named part of a model; equal to itself only.

    `params` are what a client may set, `args` what a recipe may set. The `main` stage gets bare engine flags of the command line.
    """

    name: str
    spec: EngineSpec
    takes: tuple[Kind, ...]
    gives: tuple[Kind, ...]
    params: tuple[Param, ...] = ()
    args: tuple[Param, ...] = ()
    main: bool = False

    @property
    def all_args(self) -> tuple[Param, ...]:
        return (*self.spec.args, *self.args)


@dataclass(frozen=True, slots=True)
class Edge:
    """`kind` flows from `source` to `target`, through `bridge` if one is named.

    Edges into one stage that name the same bridge form a group and are joined by it. A stage runs without its `optional` edges
    when their source has nothing to do for a request.
    """

    source: Stage
    target: Stage
    kind: Kind
    bridge: str | None = None
    optional: bool = False

    @property
    def key(self) -> str:
        """The name of this stream in a bridge's `inputs`."""
        return f"{self.source.name}.{self.kind.name}"

    @property
    def name(self) -> str:
        """The name a recipe uses; edges of other kinds between the same stages share it."""
        return f"{self.source.name}->{self.target.name}"

    @property
    def id(self) -> str:
        return f"{self.key}->{self.target.name}"


@dataclass(frozen=True, slots=True)
class Route:
    """The part of a graph that one request uses."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    outputs: Mapping[Kind, Stage]


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Stages, edges, and the stage each output comes from.

    Stages without an incoming edge take the request itself. `stages` need only be given for a graph without edges.
    Raises GraphError, with every fault, if a stage could never run or an output never arrive.
    """

    name: str
    edges: tuple[Edge, ...] = ()
    outputs: Mapping[Kind, Stage] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        ends = (end for edge in self.edges for end in (edge.source, edge.target))
        stages = list(dict.fromkeys([*self.stages, *ends]))
        faults = list(_faults(stages, self.edges, self.outputs))
        sorter = TopologicalSorter({stage.name: [edge.source.name for edge in self.edges if edge.target == stage] for stage in stages})
        try:
            order = list(sorter.static_order())
        except CycleError as error:
            faults.append(f"Stages {' -> '.join(reversed(error.args[1]))} form a cycle.")
        if faults:
            raise GraphError(f"Graph '{self.name}': " + " ".join(faults))
        object.__setattr__(self, "stages", tuple(sorted(stages, key=lambda stage: order.index(stage.name))))

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises KeyError."""
        return {stage.name: stage for stage in self.stages}[name]

    def incoming(self, stage: Stage) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == stage)

    @property
    def entries(self) -> tuple[Stage, ...]:
        """The stages that take the request itself."""
        return tuple(stage for stage in self.stages if not self.incoming(stage))

    @property
    def takes(self) -> tuple[Kind, ...]:
        """The kinds a client may send."""
        return tuple(dict.fromkeys(kind for stage in self.entries for kind in stage.takes))

    @property
    def params(self) -> dict[str, Param]:
        """What a client may set, over all stages."""
        return {param.name: param for stage in self.stages for param in stage.params}

    @property
    def main(self) -> Stage | None:
        return next((stage for stage in self.stages if stage.main), None)

    def route(self, wanted: Iterable[Kind], given: Iterable[Kind]) -> Route:
        """The part that makes the `wanted` outputs from the `given` kinds: none means text, or else the first one.

        Progress is told if there is some to tell. Raises RequestError.
        """
        given, asked = set(given), dict.fromkeys(wanted)
        wanted = [kind for kind in asked if kind != PROGRESS] or [TEXT if TEXT in self.outputs else next(iter(self.outputs))]
        for kind in wanted:
            if kind not in self.outputs:
                raise RequestError(f"This model gives {', '.join(map(str, self.outputs))}; it cannot give '{kind}'.", param="modalities")
        for kind in given:
            if kind not in self.takes:
                raise RequestError(f"This model takes {', '.join(map(str, self.takes))}; it cannot take '{kind}'.", param="messages")
        running: list[Stage] = []
        for stage in self.stages:
            edges = self.incoming(stage)
            ready = [edge for edge in edges if edge.source in running]
            complete = all(edge in ready for edge in edges if not edge.optional)
            if (complete and ready) if edges else given & set(stage.takes):
                running.append(stage)
        needed: list[Stage] = []
        for kind in wanted:
            if self.outputs[kind] not in running:
                raise RequestError(f"Making '{kind}' needs an input this request lacks.", param="messages")
            needed.append(self.outputs[kind])
        for stage in needed:
            needed += [e.source for e in self.incoming(stage) if e.source in running and e.source not in needed]
        if PROGRESS in asked and self.outputs.get(PROGRESS) in needed:
            wanted.append(PROGRESS)
        edges = tuple(edge for edge in self.edges if edge.source in needed and edge.target in needed)
        return Route(tuple(s for s in self.stages if s in needed), edges, {kind: self.outputs[kind] for kind in wanted})


def _faults(stages: list[Stage], edges: tuple[Edge, ...], outputs: Mapping[Kind, Stage]) -> Iterable[str]:
    names = [stage.name for stage in stages]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"Two different stages are named '{name}'."
    for stage in stages:
        if not stage.name.isidentifier():
            yield f"Stage name '{stage.name}' is not an identifier."
        if not (isinstance(stage.takes, tuple) and isinstance(stage.gives, tuple)):
            yield f"Stage '{stage.name}': `takes` and `gives` are tuples of kinds; one kind is written (TEXT,)."
            return
        for kind in (*stage.takes, *stage.gives):
            if not isinstance(kind, Kind):
                yield f"Stage '{stage.name}' names the unknown kind {kind!r}; kinds are objects such as TEXT or Kind('codes')."
    for edge in edges:
        what = f"Edge {edge.name} carries the unknown kind '{edge.kind}'"
        if edge.kind not in edge.source.gives:
            yield f"{what}: '{edge.source.name}' does not give it."
        if edge.bridge is None and edge.kind not in edge.target.takes:
            yield f"{what}: '{edge.target.name}' does not take it and no bridge changes it."
    for edge_id in sorted({edge.id for edge in edges if sum(other.id == edge.id for other in edges) > 1}):
        yield f"Edge {edge_id} is declared twice."
    if not outputs:
        yield "The graph has no output."
    for kind, stage in outputs.items():
        if kind not in PUBLIC_KINDS.values():
            yield f"Output '{kind}' is an unknown kind to clients; outputs are {', '.join(PUBLIC_KINDS)}."
        if stage not in stages:
            yield f"Output '{kind}' comes from '{stage.name}', which is not in the graph."
        elif kind not in stage.gives:
            yield f"Output '{kind}' is missing: stage '{stage.name}' does not give it."
    useful = list(outputs.values())
    for stage in useful:
        useful += [edge.source for edge in edges if edge.target == stage and edge.source not in useful]
    for stage in stages:
        if stage not in useful:
            yield f"Stage '{stage.name}' is unreachable: nothing it gives arrives at an output."
        if not any(edge.target == stage for edge in edges) and not any(kind in PUBLIC_KINDS.values() for kind in stage.takes):
            yield f"Stage '{stage.name}' is unreachable: no edge feeds it and it takes nothing a client can send."
    if sum(stage.main for stage in stages) > 1:
        yield "More than one stage is the main one."
