"""Processes that die: stages, the forkserver, the parent. What is left, what is told, what comes back. And many aborts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import aclosing, suppress
from pathlib import Path

import psutil
import pytest
from holding import nothing_held

from vllm_omni.errors import AbortedError, DeadlineError, StageError, UnavailableError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import AUDIO, IMAGE, TEXT
from vllm_omni.request import Request


def pids(omni: AsyncOmni) -> dict[str, int]:
    return {replica.name: replica.pid for replica in omni.orchestrator._replicas.replicas}


async def until_ready(omni: AsyncOmni) -> None:
    while not omni.health().ready:
        await asyncio.sleep(0.01)


def private_bytes(pid: int) -> int:
    """The memory of a process that it shares with no other; what it shares is a pool, and counted as blocks."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_killed_stage_fails_its_requests_and_comes_back() -> None:
    """F112: no hang; the error is told at once, health is bad, the stage returns, the next request succeeds."""

    async def main() -> None:
        async with asyncio.timeout(30), AsyncOmni("echo") as omni:
            victim = asyncio.create_task(omni.generate("la " * 300, (TEXT, AUDIO), delay_ms=10.0))
            unhurt = asyncio.create_task(omni.generate("a b c d e", (TEXT,), delay_ms=20.0))
            await asyncio.sleep(0.1)
            killed = time.monotonic()
            os.kill(pids(omni)["singer.0"], signal.SIGKILL)
            with pytest.raises(UnavailableError, match="killed by SIGKILL") as caught:
                await victim
            assert caught.value.stage == "singer"
            assert time.monotonic() - killed < 2
            health = omni.health()
            assert not health.ready and "restarting in" in health.reason
            with pytest.raises(UnavailableError, match="not available"):
                await omni.generate("a", (AUDIO,))
            assert (await unhurt).text == "a b c d e"
            await until_ready(omni)
            assert (await omni.generate("a b", (TEXT, AUDIO))).text == "a b"
            await nothing_held(omni)

    asyncio.run(main())


def test_a_stage_that_keeps_dying_is_restarted_with_backoff() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), AsyncOmni("echo") as omni:
            delays = []
            for _ in range(3):
                os.kill(pids(omni)["singer.0"], signal.SIGKILL)
                while omni.health().ready:
                    await asyncio.sleep(0.005)
                delays.append(float(omni.health().reason.partition("restarting in ")[2].split()[0]))
                await until_ready(omni)
            assert delays == [0.1, 0.2, 0.4]

    asyncio.run(main())


def test_a_killed_forkserver_is_replaced() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), AsyncOmni("echo") as omni:
            server = psutil.Process(pids(omni)["singer.0"]).parent()
            assert server is not None and server.pid != os.getpid()
            server.kill()
            while omni.health().ready:
                await asyncio.sleep(0.005)
            await until_ready(omni)
            assert (await omni.generate("a b", (TEXT, AUDIO))).text == "a b"

    asyncio.run(main())


def test_a_request_that_gave_nothing_yet_is_retried_on_another_replica() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), AsyncOmni("echo", settings=["stages.singer.replicas=2"]) as omni:
            working = [asyncio.create_task(omni.generate("a b c d", (AUDIO,), delay_ms=100.0)) for _ in range(4)]
            await asyncio.sleep(0.05)
            os.kill(pids(omni)["singer.0"], signal.SIGKILL)
            lengths = {len((await task).audio) for task in working}
            assert lengths == {int(4 * 0.12 * 24_000)}
            assert omni.health().stages["singer.1"] == "ready"

    asyncio.run(main())


def test_replicas_share_the_work() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), AsyncOmni("echo", settings=["stages.singer.replicas=2"]) as omni:
            working = [asyncio.create_task(omni.generate("a b c d", (AUDIO,), delay_ms=50.0)) for _ in range(4)]
            await asyncio.sleep(0.1)
            stats = await omni.stats()
            assert stats["singer.0"]["jobs"] == stats["singer.1"]["jobs"] == 2
            await asyncio.gather(*working)

    asyncio.run(main())


def test_a_stage_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The error of `start()` is the stage's own."""
    package = tmp_path / "broken_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(
        "from vllm_omni.api import *\n"
        "s = Stage('decoder', OneShot('broken_plugin.stage:Decoder'), takes=(TEXT,), gives=(TEXT,))\n"
        "PLUGIN = ModelPlugin('broken', graphs=(StageGraph('broken', stages=(s,), outputs={TEXT: s}),))\n"
    )
    (package / "stage.py").write_text(
        "from vllm_omni.api import OneShotModule\n"
        "class Decoder(OneShotModule):\n"
        "    def load(self, ctx): raise ValueError('no weights here')\n"
    )
    info = tmp_path / "broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_omni.aliases]\nbroken = broken_plugin.plugin:PLUGIN\n")
    script = "import sys; from vllm_omni import Omni\ntry: Omni('broken')\nexcept Exception as e: print(type(e).__name__, e); sys.exit(3)"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 3, done.stderr
    assert "StageError Stage 'decoder' cannot start: ValueError: no weights here" in done.stdout


PARENT = """
import asyncio, sys
from vllm_omni import AsyncOmni
from vllm_omni.request import Request
from vllm_omni.payload import AUDIO, TEXT
async def main():
    omni = AsyncOmni("echo")
    await omni.start()
    async for payload in omni.stream(Request.of("la " * 3000, outputs=(TEXT, AUDIO), params={"delay_ms": 5.0, "array_kib": 64})):
        print(payload.kind, omni.orchestrator._replicas._directory, flush=True)
asyncio.run(main())
"""


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    """F116: SIGKILL in mid-stream; no process, no shared memory, no socket directory."""
    before = segments()
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        directory = parent.stdout.readline().split()[1]
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 5 and Path(directory).is_dir()
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert not alive
    assert not Path(directory).exists()
    assert segments() == before


def test_a_thousand_aborts_leave_nothing() -> None:
    """1,000 requests aborted at random moments: every map empty in every process, no block lent, memory flat."""

    async def one(omni: AsyncOmni, dice: random.Random) -> None:
        outputs = dice.choice([(TEXT,), (AUDIO,), (TEXT, AUDIO, IMAGE)])
        params = {"delay_ms": dice.choice([0.0, 0.0, 0.5, 3.0]), "array_kib": dice.choice([0, 64, 512])}
        request = Request.of("la " * dice.choice([1, 5, 30]), outputs=outputs, params=params, timeout=dice.choice([None, None, 0.02]))
        with suppress(AbortedError, DeadlineError):
            match dice.randrange(3):
                case 0:
                    task = asyncio.create_task(omni.generate(request))
                    await asyncio.sleep(dice.random() * 0.05)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                case 1:
                    async with aclosing(omni.stream(request)) as chunks:
                        left = dice.randrange(6)
                        async for _ in chunks:
                            if not left:
                                break
                            left -= 1
                case _:
                    task = asyncio.create_task(omni.generate(request))
                    await asyncio.sleep(dice.random() * 0.05)
                    await omni.abort(request.id)
                    await task

    async def round_of(omni: AsyncOmni, dice: random.Random, count: int) -> float:
        limit = asyncio.Semaphore(32)

        async def bounded() -> None:
            async with limit:
                await one(omni, dice)

        await asyncio.gather(*(bounded() for _ in range(count)))
        await nothing_held(omni)
        return sum(private_bytes(pid) for pid in (os.getpid(), *pids(omni).values()))

    async def main() -> None:
        async with asyncio.timeout(120), AsyncOmni("echo") as omni:
            dice = random.Random(7)
            before = segments()
            warm = await round_of(omni, dice, 300)
            after = await round_of(omni, dice, 1000)
            assert segments() == before
            assert after - warm < 0.1 * warm, f"memory grew from {warm / 2**20:.0f} to {after / 2**20:.0f} MiB"
            assert (await omni.generate("still here", (TEXT, AUDIO, IMAGE))).text == "still here"

    asyncio.run(main())


def test_a_failing_stage_does_not_hold_the_stop() -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            omni = AsyncOmni("echo")
            await omni.start()
            working = asyncio.create_task(omni.generate("la " * 500, (AUDIO,), delay_ms=20.0))
            await asyncio.sleep(0.05)
            children = [psutil.Process(pid) for pid in pids(omni).values()]
            await omni.stop()
            with pytest.raises((AbortedError, StageError)):
                await working
            assert not psutil.wait_procs(children, timeout=2)[1]

    asyncio.run(main())
