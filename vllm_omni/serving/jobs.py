"""Jobs: requests that go on without their client, and what they made, which outlives the server.

`Store` is a folder with SQLite and a file for each job; its calls block. `Jobs` runs them. Neither knows a protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vllm_omni.errors import NotFoundError, OmniError, RequestError, SettingError, UnavailableError
from vllm_omni.serving.reply import CLOSING, fault

EARLY = 0.5
"""Seconds that a new job has to say that it is refused, so that its client learns of it at once; a job that begins does not wait."""
KEPT = 24 * 60 * 60
"""Seconds that a job is kept after its end."""
RESTARTED = {"code": UnavailableError.code, "message": "The server was restarted before this was done. Ask for it again."}
UNDER_WAY = ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class Job:
    """What is known of a job. `status` is queued, in_progress, completed or failed; times are in seconds since 1970.

    `about` is the protocol's own. `file` names what was made, in the store, "" as long as there is nothing.
    """

    id: str
    about: dict[str, Any]
    status: str = "queued"
    created_at: int = field(default_factory=lambda: int(time.time()))
    completed_at: int | None = None
    expires_at: int | None = None
    error: dict[str, str] | None = None
    file: str = ""


class Store:
    """The folder, which one server has at a time. Calls block, and may come from any thread.

    Jobs that a server left unfinished are failed ones. Raises SettingError for a folder that cannot be had.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._guard = threading.Lock()
        self._opened = contextlib.ExitStack()
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            lock = self._opened.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            database = sqlite3.connect(folder / "jobs.sqlite", check_same_thread=False, isolation_level=None)
            self._jobs = self._opened.enter_context(contextlib.closing(database))
            columns = "number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, status TEXT, expires INTEGER, record BLOB"
            self._jobs.execute(f"CREATE TABLE IF NOT EXISTS jobs ({columns})")
            for job in self._select("WHERE status IN (?, ?)", *UNDER_WAY):
                self.put(ended(job, RESTARTED))
            kept = {job.file for job in self._select("")}
            for path in self._files.iterdir():
                if path.name not in kept:  # of a job that was ended while its file was written
                    path.unlink()
        except BlockingIOError:
            self._opened.close()
            said = f"Another server keeps its jobs in {folder}: choose another folder with --store."
            raise SettingError(said, param="store") from None
        except (OSError, sqlite3.Error, msgspec.MsgspecError) as error:
            self._opened.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingError(f"Jobs cannot be kept in {folder}: {reason}. Choose another folder with --store.", param="store") from error
        self.expire()

    def put(self, job: Job) -> None:
        """Keep a job, in the place of what was known of it."""
        row = (job.id, job.status, job.expires_at, msgspec.json.encode(job))
        update = "ON CONFLICT (id) DO UPDATE SET status = excluded.status, expires = excluded.expires, record = excluded.record"
        with self._guard:
            self._jobs.execute(f"INSERT INTO jobs (id, status, expires, record) VALUES (?, ?, ?, ?) {update}", row)

    def get(self, name: str) -> Job:
        """Raises NotFoundError for a job that is not, or no longer, here."""
        self.expire()
        for job in self._select("WHERE id = ?", name):
            return job
        raise NotFoundError(f"There is no job '{name[:100]}' here. Jobs are removed {KEPT // 3600} hours after their end.")

    def page(self, after: str | None, limit: int, *, newest: bool) -> tuple[list[Job], bool]:
        """At most `limit` jobs by their age, those after the job `after`, and whether there are more."""
        self.expire()
        order, beyond = ("DESC", "<") if newest else ("ASC", ">")
        if after is not None and not self._select("WHERE id = ?", after):
            raise RequestError(f"'after' is '{after[:100]}', and there is no such job.", param="after")
        where = "" if after is None else f"WHERE number {beyond} (SELECT number FROM jobs WHERE id = ?)"
        given = [] if after is None else [after]
        found = self._select(f"{where} ORDER BY number {order} LIMIT ?", *given, limit + 1)
        return found[:limit], len(found) > limit

    def path(self, job: Job) -> Path:
        """Where its file is."""
        return self._files / job.file

    def keep(self, job: Job, data: bytes, suffix: str) -> str:
        """The name of a new file, on the disk with all its bytes. Raises OmniError if it cannot be written."""
        name = f"{job.id}.{suffix}"
        part = self._files / f"{name}.part"
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._files / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise OmniError(f"What was made cannot be stored: {error.strerror}.") from error
        return name

    def remove(self, job: Job) -> None:
        """A job and its file."""
        if job.file:
            self.path(job).unlink(missing_ok=True)
        with self._guard:
            self._jobs.execute("DELETE FROM jobs WHERE id = ?", (job.id,))

    def expire(self) -> None:
        """Remove the jobs whose time is over."""
        for job in self._select("WHERE expires < ?", int(time.time())):
            self.remove(job)

    def close(self) -> None:
        with self._guard:
            self._opened.close()

    def _select(self, rest: str, *values: Any) -> list[Job]:
        with self._guard:
            rows = self._jobs.execute(f"SELECT record FROM jobs {rest}", values).fetchall()
        return [msgspec.json.decode(record, type=Job) for (record,) in rows]


def ended(job: Job, error: dict[str, str] | None, **made: Any) -> Job:
    """The job at its end: failed if there is an `error`, else completed."""
    now = int(time.time())
    status, completed = ("failed", None) if error else ("completed", now)
    return replace(job, status=status, error=error, completed_at=completed, expires_at=now + KEPT, **made)


class Work(Protocol):
    """Makes the file of a job. `progress` is how far it is, in percent."""

    progress: int

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """The file as it grows, piece by piece; b"" when only the progress changed."""

    def file(self, grown: bytes) -> tuple[bytes, str, dict[str, Any]]:
        """The file to keep, of all its pieces; its suffix, and what is known of it now. Blocks."""


@dataclass(slots=True, eq=False)
class Live:
    """A job under way, with the pieces of its file that are there."""

    job: Job
    work: Work
    task: asyncio.Task[None] | None = None
    pieces: list[bytes] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    error: OmniError | None = None
    over: bool = False

    def tell(self) -> None:
        """Wake whoever waits for news."""
        self.news.set()
        self.news = asyncio.Event()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """The pieces of the file, those to come as they come. Raises OmniError if the job fails."""
        count = 0
        while count < len(self.pieces) or not self.over:
            if count == len(self.pieces):
                await self.news.wait()
            else:
                piece = b"".join(self.pieces[count:])
                count = len(self.pieces)
                yield piece
        if self.error:
            raise self.error


class Jobs:
    """The jobs of one server; `running` are its tasks, which it cancels with `CLOSING` when it shuts down."""

    def __init__(self, store: Store, running: set[asyncio.Task[Any]]) -> None:
        self.store = store
        self._running = running
        self._live: dict[str, Live] = {}

    async def start(self, job: Job, work: Work) -> Live:
        """Begin a job. Raises the RequestError that refuses it, if that comes early: then there is no job."""
        await asyncio.to_thread(self.store.put, job)
        live = self._live[job.id] = Live(job, work)
        task = live.task = asyncio.create_task(self._run(live))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(live.begun.wait(), EARLY)
        if isinstance(live.error, RequestError):
            await self.remove(job.id)
            raise live.error
        return live

    async def get(self, name: str) -> Job | Live:
        """A job; as a `Live` one while it is under way. Raises NotFoundError."""
        live = self._live.get(name)
        return live if live else await asyncio.to_thread(self.store.get, name)

    async def page(self, after: str | None, limit: int, *, newest: bool) -> tuple[Sequence[Job | Live], bool]:
        """See `Store.page`."""
        jobs, more = await asyncio.to_thread(self.store.page, after, limit, newest=newest)
        return [self._live.get(job.id, job) for job in jobs], more

    async def remove(self, name: str) -> None:
        """Remove a job; abort it first if it is under way. Raises NotFoundError."""
        live = self._live.get(name)
        if live and live.task:
            if not live.over:
                live.task.cancel()
            await asyncio.wait((live.task,))
        job = await asyncio.to_thread(self.store.get, name)
        await asyncio.to_thread(self.store.remove, job)
        self._live.pop(name, None)

    async def _run(self, live: Live) -> None:
        error: BaseException | None
        try:
            [error] = await asyncio.gather(self._make(live), return_exceptions=True)  # whatever it is ends this job alone
        except asyncio.CancelledError as cancelled:
            closing = cancelled.args == (CLOSING,)
            error = UnavailableError(f"This was cut short: {CLOSING}.") if closing else NotFoundError("This job was deleted.")
        if error:
            told = live.error = fault(error)
            live.job = ended(live.job, {"code": told.code, "message": told.message})
        live.over = True
        live.begun.set()
        live.tell()
        try:
            await asyncio.to_thread(self.store.put, live.job)
        except sqlite3.Error as lost:  # the disk is full, say: until the server ends, it is known here
            fault(lost)
        else:
            del self._live[live.job.id]

    async def _make(self, live: Live) -> None:
        async with contextlib.aclosing(live.work.pieces()) as pieces:
            async for piece in pieces:
                if live.job.status == "queued":
                    live.job = replace(live.job, status="in_progress")
                    live.begun.set()
                if piece:
                    live.pieces.append(piece)
                    live.tell()
        data, suffix, about = await asyncio.to_thread(live.work.file, b"".join(live.pieces))
        file = await asyncio.to_thread(self.store.keep, live.job, data, suffix)
        live.job = ended(live.job, None, about={**live.job.about, **about}, file=file)
