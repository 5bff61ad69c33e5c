"""The server as its endpoints see it: the model, whether it is ready, and the requests that are open.

It starts and stops nothing: `run.py` owns the processes and the port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from vllm_omni.errors import NotFoundError, RequestError, UnavailableError
from vllm_omni.payload import ACTION, AUDIO, IMAGE, TEXT, VIDEO, Kind, Payload, action, audio, image, text, video
from vllm_omni.request import Message, Request, new_id
from vllm_omni.serving.metrics import Metrics
from vllm_omni.serving.reply import CLOSING

if TYPE_CHECKING:
    from vllm_omni.deployment import Deployment
    from vllm_omni.omni import AsyncOmni

log = logging.getLogger(__name__)


class UnknownModelError(NotFoundError):
    """A model that is not served here."""

    code = "model_not_found"


class Server:
    """Runs requests for endpoints, and knows which are open."""

    def __init__(self, omni: AsyncOmni) -> None:
        self.omni = omni
        self.deployment: Deployment = omni.deployment
        self.created = int(time.time())
        self.running: set[asyncio.Task[Any]] = set()
        self.metrics = Metrics(self.running)
        self._waiting = "starting"

    @property
    def unready(self) -> str:
        """Why no request can be served now; empty when one can."""
        health = self.omni.health()
        return self._waiting if health.ready else health.reason

    def stream(self, request: Request) -> AsyncGenerator[Payload, None]:
        """Run a request. Raises UnavailableError while the server cannot."""
        if reason := self.unready:
            raise UnavailableError(f"The server is not ready: {reason}.")
        return self.omni.stream(request)

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError if a request names a model that is not the served one."""
        served = self.deployment.served_name
        if name is not None and name != served:
            raise UnknownModelError(f"The model '{name[:100]}' is not served here; '{served}' is.", param="model")

    async def warm_up(self, limit: float) -> None:
        """One small request for each output, all at once; then the server is ready. Raises TimeoutError after `limit` seconds.

        A RequestError counts as an answer: this model wants more than a small request says.
        """
        self._waiting = "warming up"
        async with asyncio.timeout(limit):
            await asyncio.gather(*map(self._once, self.deployment.graph.outputs))
        self._waiting = ""

    async def drain(self, grace: float, force: asyncio.Event) -> None:
        """Refuse what is new, and give open requests `grace` seconds, or until `force`, before they are ended with an error."""
        self._waiting = CLOSING
        forced = asyncio.create_task(force.wait())
        ends = asyncio.get_running_loop().time() + grace
        while self.running and not forced.done() and (left := ends - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait((forced, *self.running), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        for task in self.running:
            task.cancel(CLOSING)
        while self.running:
            await asyncio.wait(self.running)

    async def _once(self, kind: Kind) -> None:
        graph = self.deployment.graph
        given = [TEXT] if TEXT in graph.takes else list(graph.takes)
        try:
            graph.route((kind,), given)
        except RequestError:
            given = list(graph.takes)
        messages = (Message("user", tuple(_small(given))),)
        try:
            stages = graph.route((kind,), given).stages
            limit = {param.name: 1 for stage in stages for param in stage.params if param.name == "max_tokens"}
            request = Request(messages=messages, outputs=(kind,), params=limit, id=new_id("warmup"))
            async with aclosing(self.omni.stream(request)) as payloads:
                async for _ in payloads:
                    pass
        except RequestError as error:
            log.warning("There was no warm-up for %s: the model refused a small request: %s", kind, error.message)


def _small(kinds: Iterable[Kind]) -> Iterable[Payload]:
    """The smallest sensible payload of each kind."""
    import numpy as np

    samples = {
        TEXT: lambda: text("Hello"),
        IMAGE: lambda: image(np.zeros((64, 64, 3), np.uint8)),
        AUDIO: lambda: audio(np.zeros(4_000, np.float32), 16_000),
        VIDEO: lambda: video(np.zeros((2, 64, 64, 3), np.uint8), 2.0),
        ACTION: lambda: action(np.zeros((1, 7), np.float32)),
    }
    return [samples[kind]() for kind in kinds if kind in samples]
