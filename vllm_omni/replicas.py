"""The running replicas of a deployment's stages: started, watched, restarted, picked. Knows nothing of requests.

`InlineReplicas` keeps every stage in the calling process; `ProcessReplicas` one process per replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from vllm_omni.connectors.flows import Connector
from vllm_omni.connectors.inline import InlineConnector
from vllm_omni.connectors.messages import Message, Stop
from vllm_omni.connectors.post import LocalPost, Post
from vllm_omni.deployment import Deployment
from vllm_omni.engine import StageContext
from vllm_omni.engines.host import StageHost, start
from vllm_omni.engines.load import load_object
from vllm_omni.errors import SettingError, UnavailableError
from vllm_omni.graph import Stage


@dataclass(slots=True)
class Replica:
    """One running copy of a stage. `address` is "" while it is not ready; `state` says why. `load` counts its open jobs."""

    name: str
    stage: Stage
    address: str = ""
    state: str = "starting"
    pid: int = 0
    load: int = 0


class Replicas(Protocol):
    """All replicas of a deployment. `lost` is called with a replica that died and the reason, before it is restarted."""

    replicas: list[Replica]
    post: Post
    connector: Connector
    lost: Callable[[Replica, str, str], None]

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def handle(self, message: Message) -> bool: ...


def replicas_of(deployment: Deployment) -> list[Replica]:
    """The replicas a recipe asks for, none started."""
    placements = deployment.recipe.stages
    stages = deployment.graph.stages
    return [Replica(f"{stage.name}.{index}", stage) for stage in stages for index in range(placements[stage.name].replicas)]


def context_of(deployment: Deployment, stage: Stage) -> StageContext:
    """What the engine of a stage is started with."""
    placement = deployment.recipe.stages[stage.name]
    device = deployment.recipe.device
    args = {**{arg.name: arg.default for arg in stage.all_args}, **placement.args}
    takes, gives = (tuple(kind.name for kind in kinds) for kinds in (stage.takes, stage.gives))
    memory = getattr(stage.spec, "memory", "")
    return StageContext(
        stage.name, stage.spec.target, deployment.folder, device, placement.devices, args, placement.vllm, takes, gives, memory
    )


def pick(replicas: list[Replica], stage: Stage) -> Replica:
    """The ready replica of a stage with the fewest open jobs. Raises UnavailableError."""
    own = [replica for replica in replicas if replica.stage == stage]
    ready = [replica for replica in own if replica.address]
    if not ready:
        states = "; ".join(replica.state for replica in own)
        raise UnavailableError(f"Stage '{stage.name}' is not available ({states}). Try again shortly.", stage=stage.name)
    return min(ready, key=lambda replica: replica.load)


def check_connectors(deployment: Deployment, allowed: str) -> None:
    """Raises SettingError if a recipe names a connector that these processes cannot use."""
    for edge, link in deployment.recipe.edges.items():
        if link.connector not in ("auto", allowed):
            raise SettingError(
                f"Edge {edge}: connector '{link.connector}' cannot be used with this placement of stages; name '{allowed}' or 'auto'.",
                param=f"edges.{edge}.connector",
            )


class InlineReplicas:
    """Every stage in the calling process: no sockets, no other process, nothing copied."""

    def __init__(self, deployment: Deployment) -> None:
        check_connectors(deployment, "inline")
        self._deployment = deployment
        self.replicas = replicas_of(deployment)
        self._boxes: dict[str, LocalPost] = {}
        self.post: Post = LocalPost("client", self._boxes)
        self.connector: Connector = InlineConnector(self.post)
        self.lost: Callable[[Replica, str, str], None] = lambda replica, address, reason: None
        self._hosts: list[StageHost] = []

    async def start(self) -> None:
        engines = []
        for replica in self.replicas:
            context, post = context_of(self._deployment, replica.stage), LocalPost(replica.name, self._boxes)
            engines.append(load_object(replica.stage.spec.engine)(context))
            self._hosts.append(StageHost(replica.name, context, engines[-1], post, InlineConnector(post)))
        await asyncio.gather(*(start(engine, replica.stage.name) for engine, replica in zip(engines, self.replicas, strict=True)))
        for replica, host in zip(self.replicas, self._hosts, strict=True):
            replica.address, replica.state = replica.name, "ready"
            host.stopped = partial(self._down, replica)

    def _down(self, replica: Replica) -> None:
        address, replica.address = replica.address, ""
        if address:  # nobody asked for it
            replica.state = "down: its engine died; nothing starts it anew in this process"
            self.lost(replica, address, "its engine died")

    async def stop(self) -> None:
        for replica in self.replicas:
            replica.address, replica.state = "", "stopped"
        await asyncio.gather(*(host.stop() for host in self._hosts))
        self._hosts.clear()
        self._boxes.clear()

    def handle(self, message: Message) -> bool:
        return isinstance(message, Stop)
