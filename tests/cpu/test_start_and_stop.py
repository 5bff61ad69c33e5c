"""Starts and ends that go wrong, at every moment: what is told, and that no process, folder or warning is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import rogue

from vllm_omni.connectors.messages import Ready
from vllm_omni.errors import AbortedError, OmniError, UnavailableError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import ACTION, TEXT
from vllm_omni.process_replicas import ProcessReplicas
from vllm_omni.request import Request


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go. Nothing is left in it after a test, nor any process."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    before = set(psutil.Process().children(recursive=True))  # the server that other tests share
    yield path
    end([process for process in psutil.Process().children(recursive=True) if process not in before])
    path.rmdir()


def end(processes: list[psutil.Process]) -> None:
    """Wait for the end of processes that are about to end. Whoever adopts a dead one may be slow to bury it."""
    deadline = time.monotonic() + 5
    while left := [process for process in processes if lives(process)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.01)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


def replicas(omni: AsyncOmni) -> ProcessReplicas:
    found = omni.orchestrator._replicas
    assert isinstance(found, ProcessReplicas)
    return found


async def children(omni: AsyncOmni, count: int) -> list[psutil.Process]:
    """The stage processes, as soon as there are `count`."""
    server = replicas(omni)._server
    assert server is not None
    while len(found := psutil.Process(server.pid).children()) < count:
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("ValueError", "cannot start: ValueError: oh no"),
        ("SystemExit", r"cannot start: RuntimeError: SystemExit\(3\)"),
        ("CancelledError", "CancelledError"),
        ("StopIteration", "StopIteration"),
        ("object", "an object"),
        ("surrogate", "a pair"),
    ],
)
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "processes"])
def test_a_load_that_fails_is_told(inline: bool, does: str, says: str) -> None:
    async def main() -> None:
        with pytest.raises(OmniError, match=says):
            await AsyncOmni(rogue.deployment(does), inline=inline).start()

    run(main)


def test_a_load_that_ends_its_process_is_told() -> None:
    async def main() -> None:
        with pytest.raises(UnavailableError, match="Stage 'second' exited with code 7 while it started"):
            await AsyncOmni(rogue.deployment("exits")).start()

    run(main)


@pytest.mark.parametrize("victim", ["server", "stage"])
def test_a_process_killed_while_it_starts_is_told(victim: str) -> None:
    async def main() -> None:
        omni = AsyncOmni(rogue.deployment("sleeps"))
        starting = asyncio.create_task(omni.start())
        await asyncio.sleep(0)
        server = replicas(omni)._server
        assert server is not None
        if victim == "server":
            server.kill()  # long before it has forked anything
        else:
            for stage in await children(omni, 2):
                stage.kill()
        with pytest.raises(UnavailableError, match="while it started"):
            await starting

    run(main)


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_start_can_be_ended(how: str) -> None:
    async def main() -> None:
        omni = AsyncOmni(rogue.deployment("sleeps"))
        starting = asyncio.create_task(omni.start())
        await asyncio.sleep(0)
        await children(omni, 2)
        if how == "cancel":
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:
            await omni.stop()
            with pytest.raises(UnavailableError, match="stopped while it started"):
                await starting

    run(main)


@pytest.mark.parametrize("victim", ["server", "stage"])
def test_a_process_that_stands_still_does_not_hold_the_stop(victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.process_replicas.STOP_TIME", 0.5)

    async def main() -> None:
        omni = AsyncOmni(rogue.deployment())
        await omni.start()
        stage = (await children(omni, 2))[0]
        os.kill(stage.ppid() if victim == "server" else stage.pid, signal.SIGSTOP)
        await omni.stop()

    run(main)


def test_a_stop_that_is_cancelled_leaves_nothing() -> None:
    async def main() -> None:
        omni = AsyncOmni(rogue.deployment())
        await omni.start()
        (await children(omni, 2))[0].suspend()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(omni.stop(), 0.1)

    run(main)


def test_a_stop_while_a_stage_restarts() -> None:
    async def main() -> None:
        for pause in (0.0, 0.11):  # before and after it is launched again
            omni = AsyncOmni(rogue.deployment())
            await omni.start()
            (await children(omni, 2))[0].kill()
            while omni.health().ready:
                await asyncio.sleep(0.001)
            await asyncio.sleep(pause)
            await omni.stop()

    run(main)


def test_a_dead_process_is_not_ready_whatever_it_said_last() -> None:
    """Its last message may come after the news of its death."""

    async def main() -> None:
        async with AsyncOmni(rogue.deployment()) as omni:
            (replica,) = (replica for replica in replicas(omni).replicas if replica.name == "first.0")
            address = replica.address
            os.kill(replica.pid, signal.SIGKILL)
            while omni.health().ready:
                await asyncio.sleep(0.001)
            replicas(omni).handle(Ready("first.0", address))
            assert not omni.health().ready and "down: killed by SIGKILL" in omni.health().reason
            while not omni.health().ready:
                await asyncio.sleep(0.01)
            assert (await omni.generate("x")).text == "0 1 2 "

    run(main)


def test_arrays_and_streams_may_outlive_the_model(folder: Path) -> None:
    """What is dropped after the stop is dropped in silence."""

    async def main() -> None:
        failed: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
        omni = AsyncOmni(rogue.deployment())
        await omni.start()
        stream = omni.stream(Request.of("x", outputs=(TEXT, ACTION), params={"does": "slow", "count": 1000}))
        kept = [await anext(stream), await omni.generate("x", (TEXT, ACTION))]
        await omni.stop()
        assert not list(folder.iterdir())
        with pytest.raises(AbortedError, match="shutting down"):
            await anext(stream)
        kept.clear()
        gc.collect()
        await asyncio.sleep(0.05)
        assert not failed

    run(main)


def test_paths_that_are_no_strings_and_folders_with_long_names(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, folder])
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def main() -> None:
        async with AsyncOmni(rogue.deployment()) as omni:
            assert (await omni.generate("x")).text == "0 1 2 "

    run(main)
    long.rmdir()


PARENT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import rogue
from vllm_omni import Omni
if __name__ == "__main__":
    print("starting", flush=True)
    omni = Omni(rogue.deployment(sys.argv[2]))
    if sys.argv[3] == "fork" and os.fork() == 0:
        os.close(1)
        os.close(2)
        time.sleep(10)
        os._exit(0)
    stream = omni.stream("x", does="slow", count=10_000)
    next(stream)
    print("streaming", flush=True)
    if sys.argv[3] == "end":
        sys.exit(0)
    for _ in stream:
        pass
"""


@pytest.mark.parametrize(
    ("load", "does", "number", "whole_group"),
    [
        ("sleeps", "", signal.SIGINT, False),
        ("sleeps", "", signal.SIGINT, True),
        ("sleeps", "", signal.SIGKILL, False),
        ("", "", signal.SIGINT, True),
        ("", "", signal.SIGTERM, True),
        ("", "", signal.SIGHUP, True),
        ("", "fork", signal.SIGKILL, False),
        ("", "end", None, False),
    ],
)
def test_the_end_of_the_parent(load: str, does: str, number: signal.Signals | None, whole_group: bool) -> None:
    """Ctrl-C while it starts, a closed terminal, a kill while a process it forked lives on, an end without a word."""
    here = str(Path(rogue.__file__).parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, here, load, does], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "starting\n"
        while len(ours := [child for child in psutil.Process(parent.pid).children(recursive=True) if child.ppid() != parent.pid]) < 2:
            time.sleep(0.01)
        if not load:
            assert parent.stdout.readline() == "streaming\n"
        if number is not None:
            (os.killpg if whole_group else os.kill)(parent.pid, number)
        _, errors = parent.communicate(timeout=20)
        end(ours)
        assert parent.returncode == (-number if number is not None else 0)
        assert "Exception ignored" not in errors and "never awaited" not in errors and "destroyed" not in errors
    finally:
        parent.kill()
        parent.wait()
