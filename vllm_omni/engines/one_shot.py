"""Runs a OneShot stage: a module that turns chunks into chunks, in a thread of its own.

Whatever waits when the thread is free is worked on together: rows of one shape share a call, up to `max_batch`. No timers.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni.engine import Job, OneShotModule, Pause, StageContext
from vllm_omni.engines.attempt import attempt, resolve
from vllm_omni.engines.load import load_object
from vllm_omni.errors import StageError
from vllm_omni.payload import Payload

log = logging.getLogger(__name__)

PRELOAD = ("numpy",)
"""What the forkserver imports for stages of this engine."""

_SHARE = 0.001
"""Seconds the thread gathers results before it hands them over; a slower result is handed over at once."""

_END = object()


@dataclass(slots=True, eq=False)
class _Row:
    """A job in the thread. `aborted` is set by the event loop and read by the thread between steps."""

    job: Job
    state: Any = None
    opened: bool = False
    aborted: bool = False
    rest: Iterator[Payload | Pause] | None = None


@dataclass(slots=True)
class _Task:
    """Something to do in the thread: a call, or (without one) running a row's chunk. The answer goes to `done`."""

    row: _Row
    call: Callable[[], Any] | None = None
    payload: Any = None
    done: asyncio.Future[Any] | None = None


class OneShotEngine:
    """The engine of a stage whose target is a `OneShotModule`."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._module: OneShotModule
        self._max_batch = int(context.args["max_batch"])
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._rows: set[_Row] = set()
        self._results: list[tuple[asyncio.Future[Any], Any]] = []
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self.lost: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started = self._loop.create_future()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, args=(started,), name=f"stage-{self._context.stage}", daemon=True)
        self._thread.start()
        await started

    async def stream(self, job: Job, inputs: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
        row = _Row(job)
        self._rows.add(row)
        try:
            opened = self._ask(_Task(row, lambda: self._open(row)))
            async for payload in inputs:
                results = self._ask(_Task(row, payload=payload))
                await opened
                for result in await results:
                    yield result
            await opened
            while True:
                for item in await self._ask(_Task(row, lambda: self._pull(row))):
                    if isinstance(item, Pause):
                        await asyncio.sleep(max(0.0, item.seconds))  # of a NaN too
                    elif item is _END:
                        return
                    else:
                        yield item
        finally:
            row.aborted = True
            self._tasks.put(_Task(row, lambda: self._close(row)))

    def _ask(self, task: _Task) -> asyncio.Future[Any]:
        done = task.done = self._loop.create_future()
        done.add_done_callback(_seen)
        self._tasks.put(task)
        return done

    def held(self) -> Mapping[str, int]:
        return {"rows": len(self._rows)}

    async def stop(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            await asyncio.to_thread(self._thread.join, 5.0)

    # The rest runs in the thread.

    def _main(self, started: asyncio.Future[None]) -> None:
        loaded = attempt(self._load)
        self._answer(started, loaded)
        self._hand_over()
        while not isinstance(loaded, Exception) and self._work():
            pass
        vars(self).pop("_module", None)  # and its weights, whoever still knows this engine

    def _work(self) -> bool:
        """Wait for tasks and do them; False if one says to stop. A step of its own, that remembers no chunk while it waits."""
        tasks = [self._tasks.get()]
        while not self._tasks.empty():
            tasks.append(self._tasks.get())
        self._since = time.monotonic()
        runs: list[_Task] = []
        for task in tasks:
            if task is None:
                return False
            if task.call is None:
                runs.append(task)
            elif task.done is None or not task.row.aborted:
                self._answer(task.done, attempt(task.call))
        self._run_all(runs)
        self._hand_over()
        for task in filter(None, tasks):  # an error knows the frames it passed, this one for one; its future knows the error
            task.payload = task.done = None
        return True

    def _load(self) -> None:
        self._module = load_object(self._context.target)()
        self._module.load(self._context)

    def _open(self, row: _Row) -> None:
        row.state = self._module.open(row.job)
        row.opened = True

    def _pull(self, row: _Row) -> list[Any]:
        if row.rest is None:
            row.rest = iter(self._module.flush(row.state))
        items: list[Any] = []
        while not row.aborted:
            item = next(row.rest, _END)
            items.append(item)
            if item is _END or isinstance(item, Pause) or time.monotonic() - self._since > _SHARE:
                break
        return items

    def _close(self, row: _Row) -> None:
        self._loop.call_soon_threadsafe(self._rows.discard, row)
        if row.opened:
            try:
                getattr(row.rest, "close", lambda: None)()
            finally:
                self._module.close(row.state)

    def _run_all(self, tasks: list[_Task]) -> None:
        groups: dict[Any, list[_Task]] = {}
        for task in tasks:
            if task.row.aborted:
                continue
            if not task.row.opened:  # its stream raises what opening raised
                self._answer(task.done, ())
                continue
            key = attempt(partial(self._key, task))
            if isinstance(key, Exception):
                self._answer(task.done, key)
            else:
                groups.setdefault(key, []).append(task)
        for group in groups.values():
            for start in range(0, len(group), self._max_batch):
                self._run(group[start : start + self._max_batch])

    def _key(self, task: _Task) -> Any:
        key = self._module.shape_key(task.row.state, task.payload)
        hash(key)
        return key

    def _run(self, tasks: list[_Task]) -> None:
        self._give(tasks, attempt(partial(self._call, tasks)))

    def _call(self, tasks: list[_Task]) -> list[Any]:
        results = self._module.run([(task.row.state, task.payload) for task in tasks])
        if not isinstance(results, Sequence) or len(results) != len(tasks):
            raise StageError(f"{self._context.target}.run must return one item for each of its {len(tasks)} rows, not {results!r:.80}.")
        if any(isinstance(result, Payload) for result in results):
            raise StageError(f"{self._context.target}.run must return a list of chunks for each row, not a chunk: [[chunk], …].")
        return [result if isinstance(result, Exception) else attempt(partial(tuple, result)) for result in results]

    def _give(self, tasks: list[_Task], results: list[Any] | Exception) -> None:
        if not isinstance(results, Exception):
            for task, result in zip(tasks, results, strict=True):
                self._answer(task.done, result)
        elif len(tasks) == 1:
            self._answer(tasks[0].done, results)
        else:
            results.__traceback__ = None  # its frames know the rows
            for task in tasks:  # one by one, so that the row at fault fails alone
                self._run([task])

    def _answer(self, done: asyncio.Future[Any] | None, result: Any) -> None:
        if done is not None:
            self._results.append((done, result))
            if time.monotonic() - self._since > _SHARE:
                self._hand_over()
        elif isinstance(result, Exception):
            log.error("Stage %s failed to close a state.", self._context.stage, exc_info=result)

    def _hand_over(self) -> None:
        self._since = time.monotonic()
        if self._results and not self._loop.is_closed():
            results, self._results = self._results, []
            self._loop.call_soon_threadsafe(resolve, results)


def _seen(done: asyncio.Future[Any]) -> None:
    """An answer that nobody waits for any more is not worth a warning."""
    if not done.cancelled():
        done.exception()
