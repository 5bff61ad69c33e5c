"""Runs a Denoise stage: samples of any requests, moved from noise to data step by step, in a thread of its own.

A forward packs rows of other requests, sizes, solvers and positions; rows join and leave between forwards. A row never shares one with
rows that would more than double its time, unless all are so small that it does not matter (`budget`). Forwards that cannot be shared take
turns, a slice each (`DenoiseModule.predict` says where one ends), and each gets the same time: a picture beside a long video comes soon.

Jobs are admitted by the memory that they need (`room.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni.engine import DenoiseModule, Job, Memory, StageContext
from vllm_omni.engines.attempt import attempt, resolve
from vllm_omni.engines.load import load_object
from vllm_omni.engines.room import SHARE, Room, free_bytes, shown, together
from vllm_omni.errors import SettingError, StageError
from vllm_omni.payload import PROGRESS, Payload, progress

if TYPE_CHECKING:
    from vllm_omni.engines.packing import Moving, Pack

log = logging.getLogger(__name__)

PRELOAD = ("numpy", "torch", "vllm_omni.engines.packing")
"""What the forkserver imports for stages of this engine."""

AHEAD = 2
"""Slices that a device may be given before the oldest of them is done: enough to keep it busy, and few enough to let others in."""
TELLING = 0.05
"""Seconds between two tidings of a job's progress."""
_END = object()
NOTHING = Memory(0)


@dataclass(slots=True, eq=False)
class _Open:
    """A job, the `number`th that came. `aborted`: nobody waits for it any more. `owed` is how many rows it waits for.

    `used` is how many seconds its preparation took, or what it began with if that was late.
    """

    job: Job
    number: int
    parts: list[Payload] = field(default_factory=list)
    news: asyncio.Queue[Payload | Exception | None] = field(default_factory=asyncio.Queue)
    needs: Memory = NOTHING
    rows: list[Moving] = field(default_factory=list)
    used: float = 0.0
    owed: int = 0
    steps: int = 0
    total: int = 0
    told: float = 0.0
    aborted: bool = False


@dataclass(slots=True, eq=False)
class _Work:
    """A step of a pack, or the preparation of a job, and what is left of it."""

    of: Pack | _Open
    slices: Iterator[Any]

    @property
    def over(self) -> bool:
        """Whether nobody waits for it."""
        return self.of.aborted if isinstance(self.of, _Open) else all(row.owner.aborted for row in self.of.rows)


class DenoiseEngine:
    """The engine of a stage whose target is a `DenoiseModule`."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._module: DenoiseModule
        self._budget = int(context.args["budget"])
        self._orders: queue.SimpleQueue[_Open | None] = queue.SimpleQueue()
        self._jobs: set[_Open] = set()
        self._room = Room(0, 0)
        self._rows: list[Moving] = []
        self._work: list[_Work] = []
        self._clock = 0.0
        self._numbers = itertools.count()
        self._pace: _Pace
        self._thread: threading.Thread | None = None
        self.lost: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(started,), name=f"stage-{self._context.stage}", daemon=True)
        self._thread.start()
        await started

    async def stream(self, job: Job, inputs: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
        opened = _Open(job, next(self._numbers))
        self._jobs.add(opened)
        try:
            opened.parts = [payload async for payload in inputs]
            self._orders.put(opened)
            while (news := await opened.news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            opened.aborted, opened.parts = True, []  # the thread may remember the job until the next one comes
            self._jobs.discard(opened)
            self._orders.put(opened)

    def held(self) -> Mapping[str, int]:
        most = max((len(work.of.rows) for work in tuple(self._work)), default=0)
        counts = {"jobs": len(self._jobs), "rows": len(self._rows), "rows_together": most, "jobs_waiting": len(self._room.waiting)}
        return {**counts, "used_bytes": self._room.used(), "limit_bytes": self._room.limit}

    async def stop(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, 5.0)

    # The rest runs in the thread.

    def _main(self, started: asyncio.Future[None]) -> None:
        loaded = attempt(self._load)
        self._loop.call_soon_threadsafe(resolve, [(started, loaded)])
        if isinstance(loaded, Exception):
            return
        import torch

        with torch.inference_mode():
            while self._go_on():
                pass
        self._rows, self._work = [], []
        del self._module  # and its weights, whoever still knows this engine

    def _load(self) -> None:
        self._pace = _Pace(self._context.device)
        free, given = free_bytes(self._context.device), self._context.args.get("memory_gib")
        least = self._memory(None)
        self._room = Room(int(given * (1 << 30)) if given else int(SHARE * free), least.weights)
        for what, room in (("may be used", self._room.limit), ("is free", free)):
            if (needed := together([least])) > room:
                needs = f"{shown(least.weights)} for its weights and {shown(needed - least.weights)} for the smallest request"
                wrong = (
                    f"Stage '{self._context.stage}' needs {needs}, and {shown(room)} {what} on {self._context.device}. Nothing was loaded."
                )
                raise SettingError(wrong, stage=self._context.stage)
        self._module = load_object(self._context.target)()
        self._module.load(self._context)

    def _memory(self, job: Job | None) -> Memory:
        found: Memory = load_object(self._context.memory)(self._context, job) if self._context.memory else Memory(0)
        return found

    def _go_on(self) -> bool:
        """Take what has come, and do a slice of what has had the least time; False if the engine ends."""
        while not self._orders.empty() or not (self._rows or self._work):
            order = self._orders.get()
            if order is None:
                return False
            if order.aborted:
                self._room.leave(order)
            else:
                self._queue(order)
            self._drop()
            self._admit()
        self._depart()
        if self._work:
            work = min(self._work, key=lambda work: work.of.used)
            self._clock = work.of.used
            done = self._pace.give(work)
            if done is not None:
                self._landed(work, done)
            self._drop()
        self._admit()
        return True

    def _queue(self, opened: _Open) -> None:
        needs = attempt(partial(self._memory, opened.job))
        if not isinstance(needs, Exception):
            opened.needs = needs
            needs = attempt(partial(self._room.queue, opened))
        if isinstance(needs, Exception):
            self._tell(opened, needs)

    def _admit(self) -> None:
        for opened in self._room.admit():
            self._begin(opened)

    def _begin(self, opened: _Open) -> None:
        rows = attempt(lambda: iter(self._module.prepare(opened.job, opened.parts)))
        if isinstance(rows, Exception):
            self._close(opened, rows)
            return
        opened.used = self._clock
        self._work.append(_Work(opened, rows))

    def _landed(self, work: _Work, done: Any) -> None:
        """A slice gave something: a preparation a row, and at last the end; a step its velocities, or an error."""
        from vllm_omni.engines.packing import Moving, Pack

        if isinstance(work.of, Pack):
            self._work.remove(work)
            self._land(work.of, StageError(f"{self._context.target}.predict ended without velocities.") if done is _END else done)
        elif isinstance(done, Exception):
            self._work.remove(work)
            self._close(work.of, done)
        elif done is not _END:
            work.of.rows.append(Moving(done, work.of))
        else:
            self._work.remove(work)
            work.of.owed, work.of.total = len(work.of.rows), sum(row.row.solver.steps for row in work.of.rows)
            self._rows += work.of.rows
            if not work.of.rows:
                self._close(work.of, None)
            work.of.rows = []

    def _drop(self) -> None:
        """Forget the jobs that are over, their rows, and forwards that nobody waits for."""
        for row in tuple(self._rows):
            if row.owner.aborted:
                self._forget(row)
        for work in tuple(self._work):
            if work.over:
                self._work.remove(work)
                getattr(work.slices, "close", lambda: None)()

    def _depart(self) -> None:
        """Start forwards with the rows that wait. Those that could share one that is under way wait for it."""
        packs = [work.of for work in self._work if not isinstance(work.of, _Open)]
        under_way = {row for pack in packs for row in pack.rows}
        waiting = sorted((row for row in self._rows if row not in under_way), key=lambda row: row.cost)
        together: list[Moving] = []
        for row in [*waiting, None]:
            if together and (row is None or not self._may_share([*together, row])):
                if not any(self._may_share([*together, *pack.rows]) for pack in packs):
                    self._start(together)
                together = []
            if row is not None:
                together.append(row)

    def _start(self, rows: Sequence[Moving]) -> None:
        from vllm_omni.engines.packing import Pack

        pack = rows[0].pack
        if pack is None or pack.rows != tuple(rows):
            pack = attempt(lambda: Pack(rows, self._module))
            if isinstance(pack, Exception):
                self._fail(rows, pack)
                return
        pack.used = max(pack.used, self._clock)
        self._work.append(_Work(pack, pack.forward()))

    def _may_share(self, rows: Sequence[Moving]) -> bool:
        costs = [row.cost for row in rows]
        return sum(costs) <= max(self._budget, 2 * min(costs))

    def _land(self, pack: Pack, done: Any) -> None:
        """Move the rows of a forward by what it predicted, and finish those that are over or owe a preview."""
        moved = done if isinstance(done, Exception) else attempt(lambda: pack.move(done))
        if isinstance(moved, Exception):
            self._fail(pack.rows, moved)
            return
        for row in pack.rows:
            if row.owner.aborted:
                continue
            row.owner.steps += 1
            if row.over:
                self._end(row, attempt(partial(self._finish, row, pack.of(row, data=False))))
            elif row.step in row.row.previews:
                self._preview(row, attempt(partial(self._finish, row, pack.of(row, data=True))))
            self._tell_progress(row.owner)

    def _fail(self, rows: Sequence[Moving], error: Exception) -> None:
        """A pack failed: each of its rows tries again alone, and the one at fault fails alone."""
        if len(rows) == 1:
            self._end(rows[0], error)
            return
        error.__traceback__ = None
        for row in rows:
            if not row.owner.aborted:
                row.taken()
                self._start([row])

    def _finish(self, row: Moving, tokens: Any) -> tuple[Payload, ...]:
        return tuple(self._module.finish(row.row, tokens))

    def _preview(self, row: Moving, made: Sequence[Payload] | Exception) -> None:
        if isinstance(made, Exception):
            self._end(row, made)
            return
        number = sorted(row.row.previews).index(row.step)
        for payload in made:
            self._tell(row.owner, Payload(payload.kind, payload.data, {**payload.meta, "partial": number}))

    def _end(self, row: Moving, made: Sequence[Payload] | Exception) -> None:
        """A row is done: its chunks go out, and with the last row its job ends; or it failed, and its job with it."""
        self._forget(row)
        opened = row.owner
        if isinstance(made, Exception):
            self._close(opened, made)
            return
        for payload in made:
            self._tell(opened, payload)
        opened.owed -= 1
        if not opened.owed:
            self._close(opened, None)

    def _forget(self, row: Moving) -> None:
        self._rows.remove(row)
        row.pack = None  # which knows the row: what both have on the device is not to wait for a garbage collection

    def _tell_progress(self, opened: _Open) -> None:
        now = time.monotonic()
        if PROGRESS in opened.job.wants and now - opened.told >= TELLING and opened.owed:
            opened.told = now
            self._tell(opened, progress(opened.steps, opened.total))

    def _close(self, opened: _Open, error: Exception | None) -> None:
        """A job is over: it ended, or failed, and the rest of its rows with it."""
        opened.aborted = True
        self._room.leave(opened)
        self._tell(opened, error)

    def _tell(self, opened: _Open, news: Payload | Exception | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(opened.news.put_nowait, news)


class _Pace:
    """How fast slices are given to a device, and how long those of each pack or preparation took."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._given: deque[tuple[Pack | _Open, Any, Any]] = deque()

    def give(self, work: _Work) -> Any:
        """Give the device the next slice of this, and wait for the one before the last. What the slice gives, or its exception."""
        began = self._now()
        found = attempt(partial(next, work.slices, _END))
        self._given.append((work.of, began, self._now()))
        while len(self._given) > (0 if self._device == "cpu" else AHEAD):
            of, begin, end = self._given.popleft()
            of.used += self._between(begin, end)
        return found

    def _now(self) -> Any:
        if self._device == "cpu":
            return time.perf_counter()
        import torch

        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        """Seconds."""
        if self._device == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
