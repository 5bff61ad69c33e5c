"""A model that misbehaves on request: `does` is "WHERE WHAT", a place in its code and what happens there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vllm_omni.api import (
    ACTION,
    TEXT,
    Edge,
    Job,
    Kind,
    ModelPlugin,
    OneShot,
    OneShotModule,
    Param,
    Pause,
    Payload,
    RequestError,
    Stage,
    StageContext,
    StageGraph,
    action,
    text,
)
from vllm_omni.deployment import Deployment
from vllm_omni.recipe import Link, Placement, Recipe

CODES = Kind("codes")
DOES = Param("does", str, "")
first = Stage(
    "first", OneShot("rogue:First"), takes=(TEXT,), gives=(TEXT, CODES),
    params=(DOES, Param("count", int, 3), Param("some", dict)), args=(Param("load", str, ""),),
)  # fmt: skip
second = Stage("second", OneShot("rogue:Second"), takes=(CODES,), gives=(ACTION,), params=(DOES,), args=(Param("load", str, ""),))
GRAPH = StageGraph(
    "rogue",
    edges=(Edge(first, second, CODES, bridge="rogue:codes"), Edge(first, second, TEXT, bridge="rogue:nothing")),
    outputs={TEXT: first, ACTION: second},
)


def deployment(load: str = "", replicas: int = 1) -> Deployment:
    """`load` is what the second stage does when it loads."""
    stages = {
        stage.name: Placement(replicas=replicas, args={"max_batch": 8, "load": load if stage is second else ""}) for stage in GRAPH.stages
    }
    recipe = Recipe("rogue", stages=stages, edges={edge.name: Link() for edge in GRAPH.edges}, defaults={"does": "", "count": 3})
    return Deployment("rogue", "rogue", ModelPlugin("rogue", graphs=(GRAPH,)), "rogue", GRAPH, "", recipe)


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not to be said")


def misbehave(where: str, does: str) -> None:
    place, _, what = does.partition(" ")
    if place != where:
        return
    if what == "exits":
        os._exit(7)
    if what == "sleeps":
        time.sleep(1000)
    errors: dict[str, BaseException] = {
        "ValueError": ValueError("oh no"), "SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt(),
        "CancelledError": asyncio.CancelledError(), "StopIteration": StopIteration(), "GeneratorExit": GeneratorExit(),
        "UnsayableError": UnsayableError(), "RequestError": RequestError("no", param="does"),
        "object": RequestError(ValueError("an object")),  # type: ignore[arg-type]
        "surrogate": ValueError("half \ud800 a pair"),
    }  # fmt: skip
    if what in errors:
        raise errors[what]


class Rogue(OneShotModule):
    def load(self, ctx: StageContext) -> None:
        misbehave("load", f"load {ctx.args['load']}")

    def open(self, job: Job) -> Job:
        misbehave("open", job.params["does"])
        return job

    def close(self, job: Job) -> None:
        misbehave("close", job.params["does"])


class First(Rogue):
    def shape_key(self, job: Job, payload: Payload) -> Any:
        misbehave("shape_key", job.params["does"])
        return [] if job.params["does"] == "shape_key unhashable" else None

    def run(self, rows: Sequence[tuple[Job, Payload]]) -> Any:
        whole: dict[str, Any] = {
            "nothing": None, "a number": 5, "no row": [], "a generator": ([] for _ in rows), "an array": np.zeros(len(rows)),
        }  # fmt: skip
        row: dict[str, Any] = {"row nothing": None, "row text": "ab", "row undeclared": [Payload(Kind("codez"), "x")]}
        for job, _ in rows:
            misbehave("run", job.params["does"])
            if job.params["does"].removeprefix("returns ") in whole:
                return whole[job.params["does"].removeprefix("returns ")]
        return [row.get(job.params["does"].removeprefix("returns "), ()) for job, _ in rows]

    def flush(self, job: Job) -> Iterable[Payload | Pause]:
        return self._flush(job) if job.params["does"] != "flush nothing" else None  # type: ignore[return-value]

    def _flush(self, job: Job) -> Iterator[Payload | Pause]:
        misbehave("flush", job.params["does"])
        place, _, what = job.params["does"].partition(" ")
        if what == "pause":
            yield Pause(float("nan"))
        if place == "meta":
            endless: list[Any] = []
            endless.append(endless)
            meta: dict[str, dict[Any, Any]] = {
                "scalar": {"a": np.float32(1)}, "float64": {"a": [np.float64(1)]}, "set": {"a": {1}}, "big": {"a": 2**70},
                "surrogate": {"a": "\ud800"}, "key": {1: 2}, "object": {"a": object()}, "endless": {"a": endless},
            }  # fmt: skip
            yield Payload(CODES, np.zeros(50_000, np.float32), meta[what])
        if place == "data":
            yield Payload(CODES, {"object": object(), "map": {"a": 1}, "strings": np.array(["x"]), "scalar": np.float32(1)}[what])
        for index in range(job.params["count"]):
            if place == "slow":
                yield Pause(0.005)
            yield text("" if place == "empty" else f"{index} ")
            yield Payload(CODES, np.full(50_000, index, np.float32))


class Second(Rogue):
    def run(self, rows: Sequence[tuple[Job, Payload]]) -> Any:
        for job, _ in rows:
            misbehave("run2", job.params["does"])
        return [[action(payload.data[:1].reshape(1, 1).copy())] for _, payload in rows]


async def codes(inputs: dict[str, AsyncIterator[Payload]], job: Job) -> AsyncIterator[Payload]:
    misbehave("bridge", job.params["does"])
    async for chunk in inputs["first.codes"]:
        misbehave("mid", job.params["does"])
        yield chunk
        if job.params["does"] == "bridge ends early":
            return


async def nothing(inputs: dict[str, AsyncIterator[Payload]], job: Job) -> AsyncIterator[Payload]:
    """A second group of edges, so that the stage merges two streams; it is read and gives nothing."""
    async for _ in inputs["first.text"]:
        pass
    return
    yield
