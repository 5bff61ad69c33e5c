"""Walks each request through its graph: picks replicas, opens a job at every stage of its route, feeds it, and streams its outputs.

Chunks go from stage to stage; this sees the outputs and the ends of jobs. It polls nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni.connectors.flows import Inbox
from vllm_omni.connectors.messages import Abort, Ask, Chunk, Done, Held, Message, Open, Opened, Receive, Send, check_plain, client_id
from vllm_omni.deployment import Deployment
from vllm_omni.engines.host import rss_bytes
from vllm_omni.errors import AbortedError, DeadlineError, OmniError, RequestError, StageError, UnavailableError, from_message
from vllm_omni.graph import Route, Stage
from vllm_omni.param import check_all
from vllm_omni.payload import Payload
from vllm_omni.recipe import Link
from vllm_omni.replicas import Replica, Replicas, pick
from vllm_omni.request import Request

RECENT = 256
"""Requests whose timeline is kept."""
RETRIES = 2
ASK_TIME = 1.0
"""Seconds a stage has to say what it holds."""
_ENDS = "ends"
"""A flow without chunks: it ends with the jobs of the stages that give the outputs. A job may still fail after its last chunk."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When a stage got a request, gave its first chunk (0: none) and was done, in monotonic seconds."""

    queued: float
    first: float
    done: float


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: every stage has a replica that takes jobs. `stages` maps each replica to its state."""

    ready: bool
    stages: Mapping[str, str]
    reason: str = ""


@dataclass(slots=True)
class _Live:
    """An attempt at a request, on its way. `wire` is its id in messages; `at` are the addresses of the replicas it chose."""

    request: Request
    wire: str
    route: Route
    chosen: dict[str, Replica]
    at: dict[str, str]
    inbox: Inbox
    unopened: set[str]
    undone: set[str]
    feeding: asyncio.Task[None] | None = None


class Orchestrator:
    """Serves one deployment on the given replicas."""

    def __init__(self, deployment: Deployment, replicas: Replicas) -> None:
        self._deployment = deployment
        self._graph = deployment.graph
        self._replicas = replicas
        self._live: dict[str, _Live] = {}
        self._recent: OrderedDict[str, tuple[str, dict[str, StageTimes]]] = OrderedDict()
        self._asked: dict[int, asyncio.Future[Held]] = {}
        self._numbers = itertools.count()
        replicas.lost = self._lost
        replicas.post.listen(self._handle)

    async def start(self) -> None:
        """Start every stage; returns when all are ready."""
        await self._replicas.start()

    async def stop(self) -> None:
        """Abort what is on its way and stop every stage."""
        for live in list(self._live.values()):
            self._fail(live, AbortedError("The server is shutting down."))
        await self._replicas.stop()

    async def stream(self, request: Request) -> AsyncGenerator[Payload, None]:
        """The outputs of a request, chunk by chunk. Closing this aborts the request in every stage.

        Raises RequestError before any work, StageError if a stage fails, UnavailableError if a stage is down (after retries
        elsewhere, if nothing was given yet), DeadlineError, AbortedError.
        """
        route, params = self._plan(request)
        deadline = None if request.timeout is None else asyncio.get_running_loop().time() + max(0.0, request.timeout)
        given = False
        for attempt in itertools.count():
            try:
                async with aclosing(self._attempt(request, route, params, deadline)) as chunks:
                    async for payload in chunks:
                        given = True
                        yield payload
                return
            except UnavailableError:
                if given or attempt == RETRIES or not self._all_ready(route):
                    raise

    def _plan(self, request: Request) -> tuple[Route, dict[str, dict[str, Any]]]:
        route = self._graph.route(request.outputs, {payload.kind for payload in request.payloads()})
        given = check_all(self._graph.params.values(), request.params, f"Model '{self._deployment.served_name}'")
        used = {param.name for stage in route.stages for param in stage.params}
        for name in given:
            if name not in used:
                wanted = ", ".join(kind.name for kind in route.outputs)
                raise RequestError(f"'{name}' has no effect on the output asked for ({wanted}). Leave it out.", param=name)
        if not isinstance(request.id, str):
            raise RequestError(f"'id' must be text, not {request.id!r}.", param="id")
        for name, value in {"id": request.id, **given}.items():
            try:
                check_plain(f"'{name}'", value)
            except StageError as error:
                raise RequestError(error.message, param=name) from None
        values = {**{name: param.default for name, param in self._graph.params.items()}, **self._deployment.recipe.defaults, **given}
        params = {stage.name: {param.name: values[param.name] for param in stage.params} for stage in route.stages}
        return route, params

    def _all_ready(self, route: Route) -> bool:
        return all(any(r.address for r in self._replicas.replicas if r.stage == stage) for stage in route.stages)

    async def _attempt(
        self, request: Request, route: Route, params: dict[str, dict[str, Any]], deadline: float | None
    ) -> AsyncGenerator[Payload, None]:
        if request.id in self._live:
            raise RequestError(f"A request with the id '{request.id}' is under way; ids must be unique.", param="id")
        chosen = {stage.name: pick(self._replicas.replicas, stage) for stage in route.stages}
        wire = f"{request.id}~{next(self._numbers)}"
        edges = [_output_edge(stage, kind.name) for kind, stage in route.outputs.items()]
        inbox = self._replicas.connector.expect(wire, [*edges, _ENDS])
        at = {name: replica.address for name, replica in chosen.items()}
        live = self._live[request.id] = _Live(request, wire, route, chosen, at, inbox, set(chosen), set(chosen))
        self._recent[request.id] = wire, {}
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        timer = None
        if deadline is not None:
            late = DeadlineError(f"The request took longer than its limit of {request.timeout:g} s and was aborted.", param="timeout")
            timer = asyncio.get_running_loop().call_at(deadline, self._fail, live, late)
        for replica in chosen.values():
            replica.load += 1
        try:
            for stage in route.stages:
                self._replicas.post.send(at[stage.name], self._open(wire, stage, route, at, params[stage.name]))
            while (item := await inbox.get()) is not None:
                yield item[1]
        finally:
            if timer is not None:
                timer.cancel()
            self._free(live)

    def _fail(self, live: _Live, error: OmniError) -> None:
        """End a request with an error, now: its reader may be slow, and learns of it when it asks for the next chunk."""
        live.inbox.fail(error)
        self._free(live)

    def _free(self, live: _Live) -> None:
        if self._live.get(live.request.id) is not live:
            return
        del self._live[live.request.id]
        if live.feeding is not None:
            live.feeding.cancel()
        for name, replica in live.chosen.items():
            replica.load -= 1
            if name in live.undone and replica.address == live.at[name]:
                self._replicas.post.send(replica.address, Abort(live.wire))
        self._replicas.connector.close(live.wire)

    def _open(self, wire: str, stage: Stage, route: Route, at: dict[str, str], params: dict[str, Any]) -> Open:
        here = self._replicas.post.address
        receives = [Receive(edge.id, edge.key, edge.bridge or "") for edge in route.edges if edge.target == stage]
        if stage in self._graph.entries:
            receives.append(Receive(_input_edge(stage), "request"))
        sends = [
            Send(edge.id, edge.kind.name, at[edge.target.name], self._deployment.recipe.edges[edge.name].window)
            for edge in route.edges
            if edge.source == stage
        ]
        sends += [
            Send(_output_edge(stage, kind.name), kind.name, here, Link().window)
            for kind, source in route.outputs.items()
            if source == stage
        ]
        return Open(wire, params, receives, sends, [kind.name for kind in route.outputs], here)

    async def _feed(self, live: _Live) -> None:
        connect = self._replicas.connector.connect
        entries = [stage for stage in live.route.stages if stage in self._graph.entries]
        outlets = [(stage, connect(live.wire, _input_edge(stage), live.at[stage.name], Link().window)) for stage in entries]
        for payload in live.request.payloads():
            for stage, outlet in outlets:
                if payload.kind in stage.takes:
                    await outlet.put(payload)
        for _, outlet in outlets:
            outlet.finish()

    def _fed(self, live: _Live, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(live, RequestError(f"The request cannot be sent to its stages: {error}", param="messages"))

    def _handle(self, message: Message, body: Any) -> None:
        if self._replicas.connector.handle(message, body):
            return
        match message:
            case Opened():
                live = self._live.get(client_id(message.request))
                if live is not None and live.wire == message.request:
                    live.unopened.discard(message.stage)
                    if not live.unopened and live.feeding is None:
                        live.feeding = asyncio.get_running_loop().create_task(self._feed(live))
                        live.feeding.add_done_callback(partial(self._fed, live))
            case Done():
                self._done(message)
            case Held():
                asked = self._asked.pop(message.number, None)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case _:
                self._replicas.handle(message)

    def _done(self, message: Done) -> None:
        name = client_id(message.request)
        wire, times = self._recent.get(name, ("", {}))
        if wire == message.request:
            times[message.stage] = StageTimes(message.queued, message.first, message.done)
        live = self._live.get(name)
        if live is None or live.wire != message.request:
            return
        live.undone.discard(message.stage)
        outputs = {stage.name for stage in live.route.outputs.values()}
        if message.error is not None:
            self._fail(live, from_message(message.error))
        elif message.stage in outputs and live.undone.isdisjoint(outputs):
            live.inbox.arrive(Chunk(live.wire, _ENDS, number=0, sender="", last=True), None)

    def _lost(self, replica: Replica, address: str, reason: str) -> None:
        for live in list(self._live.values()):
            if live.chosen.get(replica.stage.name) is replica and replica.stage.name in live.undone:
                live.undone.discard(replica.stage.name)
                stage = replica.stage.name
                self._fail(live, UnavailableError(f"Stage '{stage}' went down ({reason}). Try again shortly.", stage=stage))

    async def abort(self, request_id: str) -> bool:
        """Abort a request by its id; False if none of that id is under way."""
        live = self._live.get(request_id)
        if live is not None:
            self._fail(live, AbortedError("The request was aborted."))
        return live is not None

    def health(self) -> Health:
        """Whether each stage has a replica that takes jobs, now."""
        states = {replica.name: replica.state for replica in self._replicas.replicas}
        stages = self._graph.stages
        down = [stage.name for stage in stages if not any(r.address for r in self._replicas.replicas if r.stage == stage)]
        reason = "; ".join(f"{r.name}: {r.state}" for r in self._replicas.replicas if r.stage.name in down)
        return Health(not down, states, reason)

    def timeline(self, request_id: str) -> Mapping[str, StageTimes] | None:
        """When each stage worked on a recent request."""
        return self._recent[request_id][1] if request_id in self._recent else None

    async def stats(self) -> dict[str, dict[str, float]]:
        """How much each process holds for open requests (all but bytes are zero when there are none), by replica or "api"."""
        asked: dict[int, asyncio.Future[Held]] = {}
        for replica in self._replicas.replicas:
            if replica.address:
                number = next(self._numbers)
                asked[number] = self._asked[number] = asyncio.get_running_loop().create_future()
                self._replicas.post.send(replica.address, Ask(number, self._replicas.post.address))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ASK_TIME)
        finally:
            for number in asked:
                self._asked.pop(number, None)
        answers = [future.result() for future in asked.values() if future.done()]
        own = {"requests": len(self._live), **self._replicas.connector.held(), "rss_bytes": rss_bytes()}
        return {"api": {**own}, **{answer.replica: {**answer.held} for answer in answers}}


def _input_edge(stage: Stage) -> str:
    return f"request->{stage.name}"


def _output_edge(stage: Stage, kind: str) -> str:
    return f"{stage.name}.{kind}->client"
