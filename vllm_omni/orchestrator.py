"""Walks each request through its graph: picks replicas, opens a job at every stage of its route, feeds it, and streams its outputs.

Chunks go from stage to stage; this sees the outputs and the ends of jobs. It polls nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.connectors.flows import FlowInbox
from vllm_omni.connectors.messages import Abort, Ask, Done, Held, Message, Open, Opened, Receive, Send
from vllm_omni.deployment import Deployment
from vllm_omni.engines.host import rss_bytes
from vllm_omni.errors import AbortedError, DeadlineError, OmniError, RequestError, UnavailableError, from_message
from vllm_omni.graph import Edge, Route, Stage
from vllm_omni.param import check_all
from vllm_omni.payload import Payload
from vllm_omni.recipe import Link
from vllm_omni.replicas import Replica, Replicas, health_of, pick
from vllm_omni.request import Request

RECENT = 256
"""Requests whose timeline is kept."""
RETRIES = 2
ASK_TIME = 1.0
"""Seconds a stage has to say what it holds."""


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
    """A request on its way."""

    request: Request
    chosen: dict[str, Replica]
    inbox: FlowInbox
    opened: asyncio.Future[None]
    unopened: set[str]
    undone: set[str]
    ends: asyncio.Event
    times: dict[str, StageTimes] = field(default_factory=dict)

    def fail(self, error: OmniError) -> None:
        self.inbox.fail(error)
        self.ends.set()
        if not self.opened.done():
            self.opened.set_result(None)


class Orchestrator:
    """Serves one deployment on the given replicas."""

    def __init__(self, deployment: Deployment, replicas: Replicas) -> None:
        self._deployment = deployment
        self._graph = deployment.graph
        self._replicas = replicas
        self._live: dict[str, _Live] = {}
        self._recent: OrderedDict[str, dict[str, StageTimes]] = OrderedDict()
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
            live.fail(AbortedError("The server is shutting down."))
        await self._replicas.stop()

    async def stream(self, request: Request) -> AsyncGenerator[Payload, None]:
        """The outputs of a request, chunk by chunk. Closing this aborts the request in every stage.

        Raises RequestError before any work, StageError if a stage fails, UnavailableError if a stage is down (after retries
        elsewhere, if nothing was given yet), DeadlineError, AbortedError.
        """
        route, params = self._plan(request)
        given = False
        for attempt in itertools.count():
            try:
                async with aclosing(self._attempt(request, f"{request.id}~{attempt}" if attempt else request.id, route, params)) as chunks:
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
        values = {**{name: param.default for name, param in self._graph.params.items()}, **self._deployment.recipe.defaults, **given}
        params = {stage.name: {param.name: values[param.name] for param in stage.params} for stage in route.stages}
        return route, params

    def _all_ready(self, route: Route) -> bool:
        return all(any(r.address for r in self._replicas.replicas if r.stage == stage) for stage in route.stages)

    async def _attempt(self, request: Request, wire: str, route: Route, params: dict[str, dict[str, Any]]) -> AsyncGenerator[Payload, None]:
        if wire in self._live:
            raise RequestError(f"A request with the id '{request.id}' is under way; ids must be unique.", param="id")
        chosen = {stage.name: pick(self._replicas.replicas, stage) for stage in route.stages}
        loop = asyncio.get_running_loop()
        connector = self._replicas.connector
        inbox = connector.expect(wire, [_output_edge(stage, kind.name) for kind, stage in route.outputs.items()])
        live = _Live(request, chosen, inbox, loop.create_future(), set(chosen), set(chosen), asyncio.Event())
        self._live[wire] = live
        self._recent[request.id] = live.times
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        timer = None
        if request.timeout is not None:
            late = DeadlineError(f"The request took longer than its limit of {request.timeout:g} s and was aborted.", param="timeout")
            timer = loop.call_later(request.timeout, live.fail, late)
        for replica in chosen.values():
            replica.load += 1
        feeding: asyncio.Task[None] | None = None
        try:
            for stage in route.stages:
                self._replicas.post.send(chosen[stage.name].address, self._open(wire, stage, route, chosen, params[stage.name]))
            await live.opened
            feeding = loop.create_task(self._feed(request, wire, route, live))
            while (item := await inbox.get()) is not None:
                yield item[1]
            # The last chunk of an output comes just before the end of its stage's job, which may still carry an error.
            while not live.undone.isdisjoint(stage.name for stage in route.outputs.values()):
                live.ends.clear()
                await live.ends.wait()
            await inbox.get()
        finally:
            if timer is not None:
                timer.cancel()
            if feeding is not None:
                feeding.cancel()
            for name, replica in chosen.items():
                replica.load -= 1
                if name in live.undone and replica.address:
                    self._replicas.post.send(replica.address, Abort(wire))
            connector.close(wire)
            del self._live[wire]

    def _open(self, wire: str, stage: Stage, route: Route, chosen: dict[str, Replica], params: dict[str, Any]) -> Open:
        here = self._replicas.post.address
        receives = [Receive(edge.id, edge.key, edge.bridge or "") for edge in route.edges if edge.target == stage]
        if stage in self._graph.entries:
            receives.append(Receive(_input_edge(stage), "request"))
        sends = [
            Send(edge.id, edge.kind.name, chosen[edge.target.name].address, self._link(edge).window)
            for edge in route.edges
            if edge.source == stage
        ]
        sends += [
            Send(_output_edge(stage, kind.name), kind.name, here, Link().window)
            for kind, source in route.outputs.items()
            if source == stage
        ]
        return Open(wire, params, receives, sends, here)

    def _link(self, edge: Edge) -> Link:
        return self._deployment.recipe.edges.get(edge.name, Link())

    async def _feed(self, request: Request, wire: str, route: Route, live: _Live) -> None:
        entries = [stage for stage in route.stages if stage in self._graph.entries]
        connector = self._replicas.connector
        outlets = {
            stage.name: connector.connect(wire, _input_edge(stage), live.chosen[stage.name].address, Link().window) for stage in entries
        }
        try:
            for payload in request.payloads():
                for stage in entries:
                    if payload.kind in stage.takes:
                        await outlets[stage.name].put(payload)
        except OmniError as error:
            live.fail(error)
            return
        for outlet in outlets.values():
            outlet.finish()

    def _handle(self, message: Message, body: Any) -> None:
        if self._replicas.connector.handle(message, body):
            return
        match message:
            case Opened():
                live = self._live.get(message.request)
                if live is not None:
                    live.unopened.discard(message.stage)
                    if not live.unopened and not live.opened.done():
                        live.opened.set_result(None)
            case Done():
                self._done(message)
            case Held():
                asked = self._asked.pop(message.number, None)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case _:
                self._replicas.handle(message)

    def _done(self, message: Done) -> None:
        times = self._recent.get(message.request.partition("~")[0])
        if times is not None:
            times[message.stage] = StageTimes(message.queued, message.first, message.done)
        live = self._live.get(message.request)
        if live is not None:
            live.undone.discard(message.stage)
            live.ends.set()
            if message.error is not None:
                live.fail(from_message(message.error))

    def _lost(self, replica: Replica, address: str, reason: str) -> None:
        for live in list(self._live.values()):
            if live.chosen.get(replica.stage.name) is replica and replica.stage.name in live.undone:
                live.undone.discard(replica.stage.name)
                stage = replica.stage.name
                live.fail(UnavailableError(f"Stage '{stage}' went down ({reason}). Try again shortly.", stage=stage))

    async def abort(self, request_id: str) -> bool:
        """Abort a request by its id; False if none of that id is under way."""
        found = [live for live in self._live.values() if live.request.id == request_id]
        for live in found:
            live.fail(AbortedError("The request was aborted."))
        return bool(found)

    def health(self) -> Health:
        """Whether each stage has a replica that takes jobs, now."""
        states = health_of(self._replicas.replicas)
        stages = self._graph.stages
        down = [stage.name for stage in stages if not any(r.address for r in self._replicas.replicas if r.stage == stage)]
        reason = "; ".join(f"{r.name}: {r.state}" for r in self._replicas.replicas if r.stage.name in down)
        return Health(not down, states, reason)

    def timeline(self, request_id: str) -> Mapping[str, StageTimes] | None:
        """When each stage worked on a recent request."""
        return self._recent.get(request_id)

    async def stats(self) -> dict[str, dict[str, float]]:
        """How much each process holds for open requests (all but `rss_bytes` are zero when there are none), by replica or "api"."""
        asked: dict[str, asyncio.Future[Held]] = {}
        for replica in self._replicas.replicas:
            if replica.address:
                number = next(self._numbers)
                asked[replica.name] = self._asked[number] = asyncio.get_running_loop().create_future()
                self._replicas.post.send(replica.address, Ask(number, self._replicas.post.address))
        if asked:
            await asyncio.wait(asked.values(), timeout=ASK_TIME)
        self._asked.clear()
        own = {"requests": len(self._live), **self._replicas.connector.held(), "rss_bytes": rss_bytes()}
        answers = {name: future.result().held for name, future in asked.items() if future.done()}
        return {"api": {**own}, **{name: {**held} for name, held in answers.items()}}


def _input_edge(stage: Stage) -> str:
    return f"request->{stage.name}"


def _output_edge(stage: Stage, kind: str) -> str:
    return f"{stage.name}.{kind}->client"
