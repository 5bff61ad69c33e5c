"""Runs a OneShot stage: a module that turns chunks into chunks, in a thread of its own.

Whatever waits when the thread is free is worked on together: rows of one shape share a call, up to `max_batch`. No timers.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_omni.engine import Job, OneShotModule, Pause, StageContext
from vllm_omni.engines.load import load_object
from vllm_omni.errors import StageError
from vllm_omni.payload import Payload

PRELOAD = ("numpy", "vllm_omni.engines.one_shot")
"""What the forkserver imports for stages of this engine."""

_SHARE = 0.001
"""Seconds the thread gathers results before it hands them over; a slower result is handed over at once."""

_END = object()


class _Row:
    """A job in the thread. `aborted` is set by the event loop and read by the thread between steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state: Any = None
        self.opened = False
        self.aborted = False
        self.rest: Iterator[Payload | Pause] | None = None


class _Task:
    """Something to do for a row: `open`, `run` (with a chunk), `pull` (from its flush) or `close`. Its answer goes to `done`."""

    __slots__ = ("done", "payload", "row", "what")

    def __init__(self, what: str, row: _Row, done: asyncio.Future[Any] | None = None, payload: Payload | None = None) -> None:
        self.what = what
        self.row = row
        self.done = done
        self.payload = payload


class OneShotEngine:
    """The engine of a stage whose target is a `OneShotModule`."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._max_batch = int(context.args.get("max_batch", 1))
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._rows: set[_Row] = set()
        self._results: list[tuple[asyncio.Future[Any], Any]] = []
        self._thread: threading.Thread | None = None

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
            opened = self._ask("open", row)
            async for payload in inputs:
                results = self._ask("run", row, payload)
                await opened
                for result in await results:
                    yield result
            await opened
            while True:
                items: list[Payload | Pause] = await self._ask("pull", row)
                for item in items:
                    if isinstance(item, Pause):
                        await asyncio.sleep(item.seconds)
                    elif item is _END:
                        return
                    else:
                        yield item
        finally:
            row.aborted = True
            self._tasks.put(_Task("close", row))

    def _ask(self, what: str, row: _Row, payload: Payload | None = None) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self._loop.create_future()
        done.add_done_callback(_seen)
        self._tasks.put(_Task(what, row, done, payload))
        return done

    def held(self) -> Mapping[str, int]:
        return {"rows": len(self._rows)}

    async def stop(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            await asyncio.to_thread(self._thread.join, 5.0)

    # The thread.

    def _main(self, started: asyncio.Future[None]) -> None:
        try:
            self._module: OneShotModule = load_object(self._context.target)()
            self._module.load(self._context)
        except Exception as error:  # noqa: BLE001 - the plugin's code; the stage's start fails with it
            self._results.append((started, error))
            self._hand_over()
            return
        self._results.append((started, None))
        self._hand_over()
        while True:
            tasks = [self._tasks.get()]
            while not self._tasks.empty():
                tasks.append(self._tasks.get())
            self._since = time.monotonic()
            runs: list[_Task] = []
            for task in tasks:
                if task is None:
                    self._run_all(runs)
                    self._hand_over()
                    return
                if task.what == "run":
                    runs.append(task)
                    continue
                if task.what == "close" and runs:
                    # A row must not be closed before a chunk of it that came earlier was worked on.
                    self._run_all(runs)
                    runs = []
                self._one(task)
            self._run_all(runs)
            self._hand_over()

    def _one(self, task: _Task) -> None:
        row = task.row
        if task.what == "close":
            if row.opened:
                self._guard(task, lambda: self._close(row))
            self._loop.call_soon_threadsafe(self._rows.discard, row)
        elif not row.aborted:
            self._guard(task, (lambda: self._open(row)) if task.what == "open" else (lambda: self._pull(row)))

    def _open(self, row: _Row) -> None:
        row.state = self._module.open(row.job)
        row.opened = True

    def _close(self, row: _Row) -> None:
        close_rest = getattr(row.rest, "close", None)
        if close_rest is not None:
            close_rest()
        self._module.close(row.state)

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

    def _run_all(self, tasks: list[_Task]) -> None:
        waiting = [task for task in tasks if not task.row.aborted]
        groups: dict[Any, list[_Task]] = {}
        for task in waiting:
            if task.row.opened:
                self._guard_key(task, groups)
            else:  # its stream raises what opening raised
                self._answer(task, ())
        for group in groups.values():
            for start in range(0, len(group), self._max_batch):
                self._run(group[start : start + self._max_batch])

    def _guard_key(self, task: _Task, groups: dict[Any, list[_Task]]) -> None:
        assert task.payload is not None
        try:
            key = self._module.shape_key(task.row.state, task.payload)
        except Exception as error:  # noqa: BLE001 - this request fails alone
            self._answer(task, error)
        else:
            groups.setdefault(key, []).append(task)

    def _run(self, tasks: list[_Task]) -> None:
        rows = [(task.row.state, task.payload) for task in tasks]
        try:
            results: Sequence[Any] = self._module.run(rows)  # type: ignore[arg-type]
            if len(results) != len(rows):
                raise StageError(f"{self._context.target} answered {len(results)} rows of {len(rows)}.")
        except Exception as error:  # noqa: BLE001 - the rows run again one by one, so that the one at fault fails alone
            if len(tasks) == 1:
                self._answer(tasks[0], error)
            else:
                for task in tasks:
                    self._run([task])
            return
        for task, result in zip(tasks, results, strict=True):
            self._answer(task, result)

    def _guard(self, task: _Task, call: Callable[[], Any]) -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - this request fails alone
            result = error
        self._answer(task, result)

    def _answer(self, task: _Task, result: Any) -> None:
        if task.done is not None:
            self._results.append((task.done, result))
        if time.monotonic() - self._since > _SHARE:
            self._hand_over()

    def _hand_over(self) -> None:
        self._since = time.monotonic()
        if self._results and not self._loop.is_closed():
            results, self._results = self._results, []
            self._loop.call_soon_threadsafe(_resolve, results)


def _seen(done: asyncio.Future[Any]) -> None:
    """An answer that nobody waits for any more is not worth a warning."""
    if not done.cancelled():
        done.exception()


def _resolve(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for done, result in results:
        if done.done():
            continue
        if isinstance(result, Exception):
            done.set_exception(result)
        else:
            done.set_result(result)
