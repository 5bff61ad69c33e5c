"""A stage at work: takes jobs, feeds its engine through the bridges, and sends on what the engine gives.

The same in a process of its own and inside the calling process. It knows no other stage but by address.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from vllm_omni.connectors.flows import Connector, Inbox, Outlet
from vllm_omni.connectors.messages import Abort, Ask, Done, Gone, Held, Message, Open, Opened, Receive, Stop, client_id
from vllm_omni.connectors.post import Post
from vllm_omni.engine import Engine, Job, StageContext
from vllm_omni.engines.load import load_object
from vllm_omni.errors import AbortedError, OmniError, StageError
from vllm_omni.payload import PUBLIC_KINDS, Kind, Payload

log = logging.getLogger(__name__)


class StageHost:
    """One replica of a stage. `stopped` is called once when it has been told to stop and has closed all jobs."""

    def __init__(self, replica: str, context: StageContext, engine: Engine, post: Post, connector: Connector) -> None:
        self._replica = replica
        self._context = context
        self._engine = engine
        self._post = post
        self._connector = connector
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self.stopped: Callable[[], None] = lambda: None
        self._stopping: asyncio.Task[None] | None = None
        engine.lost = self._stop
        post.listen(self._handle)

    def _handle(self, message: Message, body: Any) -> None:
        if self._connector.handle(message, body):
            return
        match message:
            case Open() if message.request not in self._jobs:
                self._open(message)
            case Abort():
                task = self._jobs.get(message.request)
                if task is not None:
                    task.cancel()
            case Gone():
                self._connector.forget(message.address)
            case Ask():
                self._post.send(message.reply, Held(message.number, self._replica, self.held()))
            case Stop():
                self._stop()
            case _:
                log.error("Stage %s got an unexpected message of type %s.", self._context.stage, type(message).__name__)

    def held(self) -> dict[str, int]:
        """How much is held for open jobs: all zero when there are none, but for `rss_bytes`, the memory of this process."""
        return {"jobs": len(self._jobs), **self._connector.held(), **self._engine.held(), "rss_bytes": rss_bytes()}

    def _stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self.stop())

    async def stop(self) -> None:
        """Close all jobs and the engine."""
        jobs = list(self._jobs.values())
        for task in jobs:
            task.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._engine.stop()
        self.stopped()

    def _open(self, message: Open) -> None:
        inbox = self._connector.expect(message.request, [receive.edge for receive in message.receives])
        outlets = [(s.kind, self._connector.connect(message.request, s.edge, s.to, s.window)) for s in message.sends]
        times = Done(message.request, self._context.stage, time.monotonic(), 0.0, 0.0)
        task = asyncio.get_running_loop().create_task(self._work(message, inbox, outlets, times))
        self._jobs[message.request] = task
        # A callback, not a `finally`: a task that is cancelled before its first step never enters its body.
        task.add_done_callback(lambda task: self._ended(task, message, times))
        self._post.send(message.reply, Opened(message.request, self._context.stage))

    async def _work(self, message: Open, inbox: Inbox, outlets: list[tuple[str, Outlet]], times: Done) -> None:
        wants = tuple(PUBLIC_KINDS.get(kind) or Kind(kind) for kind in dict.fromkeys(kind for kind, _ in outlets))
        job = Job(client_id(message.request), message.params, wants, tuple(PUBLIC_KINDS[kind] for kind in message.outputs))
        try:
            async with aclosing(self._inputs(message.receives, inbox, job)) as inputs:
                stream: Any = self._engine.stream(job, inputs)
                async with aclosing(stream):
                    async for payload in stream:
                        _check(payload, self._context.gives, f"{self._context.target} gave")
                        if not times.first:
                            times.first = time.monotonic()
                        for kind, outlet in outlets:
                            if kind == payload.kind.name:
                                await outlet.put(payload)
        except (SystemExit, asyncio.CancelledError) as error:
            if self._jobs[message.request].cancelling():
                raise
            # A bridge's own. The one would end the event loop, and the other look like an abort.
            raise StageError(f"Stage '{self._context.stage}' failed: its code raised {type(error).__name__}.") from error
        for _, outlet in outlets:
            outlet.finish()

    def _ended(self, task: asyncio.Task[None], message: Open, times: Done) -> None:
        self._jobs.pop(message.request, None)
        self._connector.close(message.request)
        times.done = time.monotonic()
        error = self._error(task, client_id(message.request))
        if not task.cancelled():
            _cut(task.exception())
        if error is not None:
            error.stage = error.stage or self._context.stage
            times.error = error.to_message()
        self._post.send(message.reply, times)

    def _error(self, task: asyncio.Task[None], request: str) -> OmniError | None:
        stage = self._context.stage
        if task.cancelled():
            return AbortedError("The request was aborted.")
        error = task.exception()
        if error is None or isinstance(error, OmniError):
            return error
        log.error("Stage %s failed on %s.", stage, request, exc_info=error)
        said = "".join(traceback.format_exception_only(error)).strip()
        return StageError(f"Stage '{stage}' failed: {said}")

    async def _inputs(self, receives: list[Receive], inbox: Inbox, job: Job) -> AsyncGenerator[Payload, None]:
        groups: dict[str, list[Receive]] = {}
        for receive in receives:
            groups.setdefault(receive.bridge, []).append(receive)
        streams = [self._bridged(bridge, group, inbox, job) for bridge, group in groups.items()]
        merged = streams[0] if len(streams) == 1 else merge(streams)
        async with aclosing(merged):
            async for payload in merged:
                _check(payload, self._context.takes, f"{' and '.join(filter(None, groups)) or 'The request'} gave '{self._context.stage}'")
                yield payload

    def _bridged(self, bridge: str, group: list[Receive], inbox: Inbox, job: Job) -> Any:
        edges = [receive.edge for receive in group]
        if not bridge:
            return _read(inbox, edges, edges)
        return load_object(bridge)({receive.key: _read(inbox, [receive.edge], edges) for receive in group}, job)


async def start(engine: Engine, stage: str) -> None:
    """Start an engine. Raises OmniError; what the engine's or the plugin's code raises is logged and becomes a StageError."""
    try:
        await engine.start()
    except OmniError:
        raise
    except Exception as error:
        log.exception("Stage %s cannot start.", stage)
        raise StageError(f"Stage '{stage}' cannot start: {type(error).__name__}: {error}", stage=stage) from error


def _check(payload: Any, kinds: Iterable[str], giver: str) -> None:
    if not isinstance(payload, Payload):
        raise StageError(f"{giver} a {type(payload).__name__} where a Payload belongs.")
    if getattr(payload.kind, "name", "") not in kinds:
        raise StageError(f"{giver} a chunk of kind '{payload.kind}', which its stage does not declare; declared are {', '.join(kinds)}.")


def _cut(error: BaseException | None) -> None:
    """Let go of the frames that an error has passed: what they know, chunks among it, would live until the next garbage collection."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def rss_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def _read(inbox: Inbox, edges: list[str], among: list[str]) -> AsyncGenerator[Payload, None]:
    while (item := await inbox.get(edges, among)) is not None:
        yield item[1]


async def merge(streams: Iterable[Any]) -> AsyncGenerator[Payload, None]:
    """The chunks of several async generators as they come. Reads at most one ahead of each; an error of one ends all."""
    queue: asyncio.Queue[Payload | BaseException | None] = asyncio.Queue(1)

    ending = False

    async def drain(stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for payload in stream:
                    await queue.put(payload)
        except BaseException as error:  # handed to the reader, whose request fails alone
            if ending:
                raise
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
