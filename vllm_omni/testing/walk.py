"""A request walked through its graph in this process, one stage after the other, so that what each bridge receives can be seen.

The stages run on their real engines. Nothing overlaps: for serving there is the orchestrator.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby

from vllm_omni.deployment import Deployment
from vllm_omni.engine import Job
from vllm_omni.engines.load import load_object
from vllm_omni.graph import Stage
from vllm_omni.payload import Payload
from vllm_omni.replicas import context_of
from vllm_omni.request import Request
from vllm_omni.testing.chunks import replay


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one bridge received for one request: a stream per edge of its group, under `Edge.key`."""

    bridge: str
    job: Job
    streams: Mapping[str, list[Payload]]

    async def cross(self, streams: Mapping[str, list[Payload]]) -> list[Payload]:
        """What the bridge makes of these streams."""
        bridge = load_object(self.bridge)
        return [chunk async for chunk in bridge({key: replay(chunks) for key, chunks in streams.items()}, self.job)]


async def crossings(deployment: Deployment, request: Request) -> list[Crossing]:
    """Every bridge that the request uses, with its input."""
    route = deployment.graph.route(request.outputs, {part.kind for part in request.payloads()})
    values = {**deployment.recipe.defaults, **request.params}
    given: dict[str, list[Payload]] = {}
    found: list[Crossing] = []
    for stage in route.stages:
        incoming = sorted((edge for edge in route.edges if edge.target == stage), key=lambda edge: edge.bridge or "")
        wants = [edge.kind for edge in route.edges if edge.source == stage] + [kind for kind, end in route.outputs.items() if end == stage]
        job = Job(request.id, {param.name: values.get(param.name) for param in stage.params}, tuple(dict.fromkeys(wants)))
        chunks = [] if incoming else [part for part in request.payloads() if part.kind in stage.takes]
        for bridge, group in groupby(incoming, key=lambda edge: edge.bridge):
            streams = {edge.key: [chunk for chunk in given[edge.source.name] if chunk.kind == edge.kind] for edge in group}
            if bridge is None:
                chunks += [chunk for stream in streams.values() for chunk in stream]
            else:
                found.append(Crossing(bridge, job, streams))
                chunks += await found[-1].cross(streams)
        given[stage.name] = await _run(deployment, stage, job, chunks)
    return found


async def _run(deployment: Deployment, stage: Stage, job: Job, chunks: list[Payload]) -> list[Payload]:
    engine = load_object(stage.spec.engine)(context_of(deployment, stage))
    await engine.start()
    try:
        async with aclosing(engine.stream(job, replay(chunks))) as stream:
            return [chunk async for chunk in stream]
    finally:
        await engine.stop()
