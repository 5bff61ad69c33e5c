"""A model as a Python object: `AsyncOmni` for servers and async programs, `Omni` for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from vllm_omni.deployment import Deployment
from vllm_omni.errors import RequestError, did_you_mean
from vllm_omni.orchestrator import Health, Orchestrator, StageTimes
from vllm_omni.payload import ACTION, AUDIO, IMAGE, PUBLIC_KINDS, TEXT, VIDEO, Kind, Payload
from vllm_omni.replicas import InlineReplicas, Replicas
from vllm_omni.request import Request
from vllm_omni.settle import deploy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """All that a request gave. `payloads` are its chunks in order; the properties join them.

    Arrays may lie in memory that a stage lends until they are dropped; copy what you keep for long.
    """

    request: str
    payloads: tuple[Payload, ...] = field(repr=False)
    timeline: Mapping[str, StageTimes] = field(default_factory=dict)

    def of(self, kind: Kind) -> list[Payload]:
        return [payload for payload in self.payloads if payload.kind == kind]

    @property
    def text(self) -> str:
        return "".join(payload.data for payload in self.of(TEXT))

    @property
    def audio(self) -> Any:
        """float32 [samples], or None."""
        return self._joined(AUDIO)

    @property
    def rate(self) -> int | None:
        """Samples a second of `audio`."""
        return next((payload.meta["rate"] for payload in self.of(AUDIO)), None)

    @property
    def images(self) -> list[Any]:
        """Pictures, each uint8 [height, width, 3]."""
        return [payload.data for payload in self.of(IMAGE)]

    @property
    def video(self) -> Any:
        """uint8 [frames, height, width, 3], or None."""
        return self._joined(VIDEO)

    @property
    def actions(self) -> Any:
        """float32 [steps, width], or None."""
        return self._joined(ACTION)

    def _joined(self, kind: Kind) -> Any:
        parts = [payload.data for payload in self.of(kind)]
        if not parts:
            return None
        import numpy

        return numpy.concatenate([numpy.asarray(part) for part in parts])


def as_request(prompt: str | Request, outputs: str | Iterable[str | Kind], params: Mapping[str, Any]) -> Request:
    """A request from what a caller wrote. Raises RequestError for an unknown kind."""
    if isinstance(prompt, Request):
        if params or tuple(outputs):
            raise RequestError("A Request brings its own outputs and parameters; give them there.")
        return prompt
    if not isinstance(prompt, str):
        raise RequestError(f"The prompt must be text or a Request, not {type(prompt).__name__}.", param="prompt")
    kinds = []
    for kind in [outputs] if isinstance(outputs, str) else outputs:
        if isinstance(kind, str):
            if kind not in PUBLIC_KINDS:
                raise RequestError(f"There is no kind of output '{kind}'.{did_you_mean(kind, PUBLIC_KINDS)}", param="outputs")
            kind = PUBLIC_KINDS[kind]
        kinds.append(kind)
    return Request.of(prompt, outputs=tuple(kinds), params=dict(params))


class AsyncOmni:
    """A model, running: a folder, an id or an alias, with the settings of `vllm_omni.settle.deploy`, or a Deployment.

    `inline` keeps every stage in the calling process; otherwise each replica has a process of its own.

    >>> async with AsyncOmni("a-model") as omni:
    ...     async for payload in omni.stream(Request.of("Hello")): ...
    """

    def __init__(self, model: str | Deployment, *, inline: bool = False, **settings: Any) -> None:
        self.deployment = model if isinstance(model, Deployment) else deploy(model, **settings)
        self._inline = inline
        self._orchestrator: Orchestrator | None = None

    async def start(self) -> None:
        """Start every stage; returns when all are ready. Raises the error of a stage that cannot start."""
        if self._orchestrator is not None:
            raise RuntimeError("This model is started already.")
        replicas: Replicas
        if self._inline:
            replicas = InlineReplicas(self.deployment)
        else:
            from vllm_omni.process_replicas import ProcessReplicas

            replicas = ProcessReplicas(self.deployment)
        self._orchestrator = Orchestrator(self.deployment, replicas)
        try:
            await self._orchestrator.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Abort what is on its way and end every stage."""
        orchestrator, self._orchestrator = self._orchestrator, None
        if orchestrator is not None:
            await orchestrator.stop()

    async def __aenter__(self) -> AsyncOmni:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    @property
    def orchestrator(self) -> Orchestrator:
        if self._orchestrator is None:
            raise RuntimeError("This model is not started; call start() or use it as a context manager.")
        return self._orchestrator

    def stream(self, prompt: str | Request, outputs: str | Iterable[str | Kind] = (), **params: Any) -> AsyncGenerator[Payload, None]:
        """The outputs of a request, chunk by chunk, in order per kind. Closing it aborts the request everywhere."""
        return self.orchestrator.stream(as_request(prompt, outputs, params))

    async def generate(self, prompt: str | Request, outputs: str | Iterable[str | Kind] = (), **params: Any) -> Result:
        """All outputs of a request."""
        request = as_request(prompt, outputs, params)
        payloads = tuple([payload async for payload in self.stream(request)])
        return Result(request.id, payloads, self.timeline(request.id) or {})

    async def abort(self, request_id: str) -> bool:
        """Abort a request; False if none of that id is under way."""
        return await self.orchestrator.abort(request_id)

    def health(self) -> Health:
        if self._orchestrator is None:
            return Health(False, {}, "not started")
        return self._orchestrator.health()

    async def stats(self) -> dict[str, dict[str, float]]:
        """What each process holds for open requests, by replica or "api"."""
        return await self.orchestrator.stats()

    def timeline(self, request_id: str) -> Mapping[str, StageTimes] | None:
        """When each stage worked on a recent request."""
        return self.orchestrator.timeline(request_id)


class Omni:
    """`AsyncOmni` for code that is not async; its event loop runs in a thread of its own.

    >>> with Omni("a-model") as omni:
    ...     print(omni.generate("Hello").text)
    """

    def __init__(self, model: str | Deployment, *, inline: bool = False, **settings: Any) -> None:
        self._omni = AsyncOmni(model, inline=inline, **settings)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="vllm-omni", daemon=True)
        self._thread.start()
        try:
            self._wait(self._omni.start())
        except BaseException:
            self._end()
            raise

    @property
    def deployment(self) -> Deployment:
        return self._omni.deployment

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its end cancels what still runs, and waits for that
            runner.run(self._closing.wait())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("This model is closed.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in this thread aborts the request
            raise

    def generate(self, prompt: str | Request, outputs: str | Iterable[str | Kind] = (), **params: Any) -> Result:
        """All outputs of a request."""
        return self._wait(self._omni.generate(prompt, outputs, **params))

    def stream(self, prompt: str | Request, outputs: str | Iterable[str | Kind] = (), **params: Any) -> Iterator[Payload]:
        """The outputs of a request, chunk by chunk. Closing the iterator aborts the request."""
        chunks = self._omni.stream(as_request(prompt, outputs, params))
        try:
            while (payload := self._wait(_next(chunks))) is not None:
                yield payload
        finally:  # waits for nothing: the collector may end a forgotten stream in any thread, the event loop's for one
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(chunks.aclose(), self._loop)

    def abort(self, request_id: str) -> bool:
        return self._wait(self._omni.abort(request_id))

    def health(self) -> Health:
        return self._omni.health()

    def stats(self) -> dict[str, dict[str, float]]:
        """What each process holds for open requests."""
        return self._wait(self._omni.stats())

    def timeline(self, request_id: str) -> Mapping[str, StageTimes] | None:
        return self._omni.timeline(request_id)

    def close(self) -> None:
        """Abort what is on its way and end every stage."""
        with self._lock:
            try:
                if not self._loop.is_closed():
                    self._wait(self._omni.stop())
            finally:
                self._end()

    def _end(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


async def _next(chunks: AsyncGenerator[Payload, None]) -> Payload | None:
    return await anext(chunks, None)
