"""The server as its endpoints see it: the model, whether it is ready, and the requests that are open.

It starts and stops nothing: `run.py` owns the processes and the port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.errors import DeadlineError, NotFoundError, OmniError, RequestError, UnavailableError
from vllm_omni.payload import PROGRESS, TEXT, Kind, Payload
from vllm_omni.request import Message, Request, new_id
from vllm_omni.samples import samples
from vllm_omni.serving.jobs import Jobs, Store
from vllm_omni.serving.metrics import Metrics
from vllm_omni.serving.reply import CLOSING

if TYPE_CHECKING:
    from vllm_omni.deployment import Deployment
    from vllm_omni.omni import AsyncOmni

log = logging.getLogger(__name__)

WARM_UP = 600.0
"""Seconds the warm-up may take before the start counts as failed."""


class UnknownModelError(NotFoundError):
    """A model that is not served here."""

    code = "model_not_found"


class Server:
    """Runs requests for endpoints, and knows which are open."""

    def __init__(self, omni: AsyncOmni, timeout: float | None = None, media: Path | None = None, store: Store | None = None) -> None:
        self.omni = omni
        self.media = media
        """The folder below which clients may name files, if any."""
        self._timeout = timeout
        self.deployment: Deployment = omni.deployment
        self.created = int(time.time())
        self.running: set[asyncio.Task[Any]] = set()
        self.metrics = Metrics(self.running)
        self.jobs = Jobs(store, self.running) if store else None
        self._waiting = "starting"

    def check_ready(self) -> None:
        """Raise UnavailableError, with the reason, unless a request would be served now."""
        health = self.omni.health()
        if reason := self._waiting if health.ready else health.reason or "starting":
            raise UnavailableError(f"The server is not ready: {reason}.")

    def stream(self, request: Request) -> AsyncGenerator[Payload, None]:
        """Run a request. Raises UnavailableError while the server cannot."""
        self.check_ready()
        return self.omni.stream(replace(request, timeout=request.timeout or self._timeout))

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError if a request names a model that is not the served one."""
        served = self.deployment.served_name
        if name is not None and name != served:
            raise UnknownModelError(f"The model '{name[:100]}' is not served here; '{served}' is.", param="model")

    async def warm_up(self, limit: float = WARM_UP) -> None:
        """One small request for each output, all at once; then the server is ready.

        Raises the error of a stage that fails on it, and DeadlineError after `limit` seconds. A RequestError is an answer: this
        model wants more than a small request says.
        """
        self._waiting = "warming up"
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*(self._once(kind) for kind in self.deployment.graph.outputs if kind != PROGRESS))
        except TimeoutError as late:
            raise late if isinstance(late, OmniError) else DeadlineError(f"The warm-up did not end within {limit:g} s.") from None
        self._waiting = ""

    async def drain(self, grace: float, force: asyncio.Event) -> None:
        """Refuse what is new, and give open requests `grace` seconds, or until `force`, before they are ended with an error."""
        self._waiting = CLOSING
        if self.running:
            log.info("Waiting for %d open requests, for at most %g s; a second signal ends them.", len(self.running), grace)
        forced = asyncio.create_task(force.wait())
        ended = asyncio.gather(*self.running, return_exceptions=True)
        await asyncio.wait((forced, ended), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        for task in self.running:
            task.cancel(CLOSING)
        await asyncio.wait((forced, *self.running), timeout=grace)

    async def _once(self, kind: Kind) -> None:
        """A small request for `kind`: of text, or, if the model refuses that, of all it takes."""
        graph = self.deployment.graph
        for given in ((TEXT,), graph.takes):
            try:
                stages = graph.route((kind,), given).stages
                small = {param.name: param.small for stage in stages for param in stage.params if param.small is not None}
                messages = (Message("user", tuple(sample for sample in samples().values() if sample.kind in given)),)
                request = Request(messages=messages, outputs=(kind,), params=small, id=new_id("warmup"))
                async with aclosing(self.omni.stream(request)) as payloads:
                    async for _ in payloads:
                        pass
                return
            except RequestError as error:
                refusal = error.message
        log.warning("There was no warm-up for %s: the model refused a small request: %s", kind, refusal)
