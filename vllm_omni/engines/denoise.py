"""Runs a Denoise stage: samples of any requests, moved from noise to data step by step, in a thread of its own.

A forward packs rows of other requests, sizes, solvers and positions; rows join and leave between forwards. A row never shares one with rows
that would more than double its time, unless all are so small that it does not matter (`budget`). Forwards that cannot be shared take
turns, a slice each (`DenoiseModule.predict` says where one ends), so that a picture beside a long video still comes promptly.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_omni.engine import DenoiseModule, Job, Row, StageContext
from vllm_omni.engines.attempt import attempt, resolve
from vllm_omni.engines.load import load_object
from vllm_omni.errors import StageError
from vllm_omni.payload import Payload

log = logging.getLogger(__name__)

PRELOAD = ("numpy", "torch", "vllm_omni.kit.solvers")
"""What the forkserver imports for stages of this engine."""


@dataclass(slots=True, eq=False)
class _Open:
    """A job. `aborted` is set by the event loop; `owed` is how many rows it waits for."""

    job: Job
    parts: list[Payload] = field(default_factory=list)
    news: asyncio.Queue[Payload | Exception | None] = field(default_factory=asyncio.Queue)
    owed: int = 0
    aborted: bool = False


@dataclass(slots=True, eq=False)
class _Moving:
    """A row on its way: its samples, and how many steps it has made."""

    open: _Open
    row: Row
    samples: Any
    table: Any
    step: int = 0

    @property
    def cost(self) -> int:
        return len(self.row.tokens) * len(self.row.passes)


@dataclass(slots=True, eq=False)
class _Forward:
    """Rows that make a step together, and what is left of it."""

    rows: Sequence[_Moving]
    slices: Iterator[Any]


class DenoiseEngine:
    """The engine of a stage whose target is a `DenoiseModule`."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._module: DenoiseModule
        self._budget = int(context.args["budget"])
        self._unfinished = StageError(f"{context.target}.predict ended without velocities.")
        self._orders: queue.SimpleQueue[_Open | None] = queue.SimpleQueue()
        self._jobs: set[_Open] = set()
        self._rows: list[_Moving] = []
        self._forwards: list[_Forward] = []
        self._thread: threading.Thread | None = None
        self.lost: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(started,), name=f"stage-{self._context.stage}", daemon=True)
        self._thread.start()
        await started

    async def stream(self, job: Job, inputs: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
        opened = _Open(job)
        self._jobs.add(opened)
        try:
            opened.parts = [payload async for payload in inputs]
            self._orders.put(opened)
            while (news := await opened.news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            opened.aborted = True
            self._jobs.discard(opened)
            self._orders.put(opened)

    def held(self) -> Mapping[str, int]:
        return {"jobs": len(self._jobs), "rows": len(self._rows)}

    async def stop(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, 5.0)

    # The rest runs in the thread.

    def _main(self, started: asyncio.Future[None]) -> None:
        loaded = attempt(self._load)
        self._loop.call_soon_threadsafe(resolve, [(started, loaded)])
        while not isinstance(loaded, Exception) and self._work():
            pass

    def _load(self) -> None:
        self._module = load_object(self._context.target)()
        self._module.load(self._context)

    def _work(self) -> bool:
        """Take what has come, and do one slice of each forward; False if the engine ends."""
        while not self._orders.empty() or not self._rows:
            order = self._orders.get()
            if order is None:
                return False
            if not order.aborted:
                self._admit(order)
            self._drop()
        self._depart()
        for forward in tuple(self._forwards):
            done = attempt(partial(next, forward.slices, self._unfinished))
            if done is not None:
                self._forwards.remove(forward)
                self._land(forward, done)
        self._drop()
        return True

    def _admit(self, opened: _Open) -> None:
        rows = attempt(lambda: [self._moving(opened, row) for row in self._module.prepare(opened.job, opened.parts)])
        if isinstance(rows, Exception):
            self._tell(opened, rows)
            return
        opened.owed = len(rows)
        self._rows += rows
        if not rows:
            self._tell(opened, None)

    def _moving(self, opened: _Open, row: Row) -> _Moving:
        from vllm_omni.kit.solvers import Samples

        return _Moving(opened, row, Samples.start(row.tokens), row.solver.table.to(row.tokens))

    def _drop(self) -> None:
        """Forget the rows of jobs that are over, and forwards that nobody waits for."""
        self._rows = [row for row in self._rows if not row.open.aborted]
        for forward in tuple(self._forwards):
            if all(row.open.aborted for row in forward.rows):
                self._forwards.remove(forward)
                getattr(forward.slices, "close", lambda: None)()

    def _depart(self) -> None:
        """Start forwards with the rows that wait. Those that could share one that is under way wait for it."""
        under_way = {row for forward in self._forwards for row in forward.rows}
        waiting = sorted((row for row in self._rows if row not in under_way), key=lambda row: row.cost)
        packed: list[_Moving] = []
        for row in [*waiting, None]:
            if packed and (row is None or not self._may_share([*packed, row])):
                if not any(self._may_share([*packed, *forward.rows]) for forward in self._forwards):
                    self._forwards.append(_Forward(packed, self._slices(packed)))
                packed = []
            if row is not None:
                packed.append(row)

    def _may_share(self, rows: Sequence[_Moving]) -> bool:
        costs = [row.cost for row in rows]
        return sum(costs) <= max(self._budget, 2 * min(costs))

    def _slices(self, rows: Sequence[_Moving]) -> Iterator[Any]:
        """What the module yields for a step of these rows."""
        import torch

        passes = [(row, each) for row in rows for each in row.row.passes]
        tokens = torch.cat([row.samples.now for row, _ in passes])
        times = torch.cat([row.table.new_full((len(row.row.tokens), 1), row.row.times[row.step]) for row, _ in passes])
        yield from self._module.predict([each for _, each in passes], tokens, times)

    def _land(self, forward: _Forward, done: Any) -> None:
        """Move the rows of a forward by what it predicted; if it failed, each tries again alone, and the one at fault fails alone."""
        if isinstance(done, Exception):
            if len(forward.rows) > 1:
                done.__traceback__ = None
                self._forwards += [_Forward([row], self._slices([row])) for row in forward.rows]
            else:
                self._end(forward.rows[0], done)
            return
        moved = attempt(lambda: self._step(forward.rows, done))
        for row in forward.rows if isinstance(moved, Exception) else ():
            self._end(row, moved)
        for row in forward.rows:
            if row.step == row.row.solver.steps and not row.open.aborted:
                self._end(row, attempt(partial(self._finish, row)))

    def _finish(self, row: _Moving) -> tuple[Payload, ...]:
        return tuple(self._module.finish(row.row, row.samples.now))

    def _step(self, rows: Sequence[_Moving], velocities: Any) -> None:
        import torch

        from vllm_omni.kit.solvers import Samples

        counts = [len(row.row.tokens) for row in rows for _ in row.row.passes]
        parts = iter(velocities.split(counts))
        moved = []
        for row in rows:
            with_prompt, *without = (next(parts) for _ in row.row.passes)
            velocity = without[0] + row.row.guidance * (with_prompt - without[0]) if without else with_prompt
            moved.append(velocity if row.row.mask is None else velocity * row.row.mask)
        weights = torch.cat([row.table[row.step].expand(len(row.row.tokens), -1) for row in rows])
        packed = Samples.join([row.samples for row in rows])
        packed.step(torch.cat(moved), weights)
        for row, samples in zip(rows, packed.split([len(row.row.tokens) for row in rows]), strict=True):
            row.samples, row.step = samples, row.step + 1

    def _end(self, row: _Moving, made: Sequence[Payload] | Exception) -> None:
        """A row is done: its chunks go out, and with the last row its job ends; or it failed, and its job with it."""
        self._rows.remove(row)
        opened = row.open
        if isinstance(made, Exception):
            self._tell(opened, made)
            opened.aborted = True
            return
        for payload in made:
            self._tell(opened, payload)
        opened.owed -= 1
        if not opened.owed:
            self._tell(opened, None)

    def _tell(self, opened: _Open, news: Payload | Exception | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(opened.news.put_nowait, news)
