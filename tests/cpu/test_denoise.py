"""The Denoise engine: who shares a forward, who waits for whom, and what happens to whom if something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from vllm_omni.engine import Job, StageContext
from vllm_omni.engines.denoise import DenoiseEngine
from vllm_omni.errors import RequestError
from vllm_omni.payload import Payload


async def nothing() -> AsyncIterator[Payload]:
    for payload in ():
        yield payload


def run(work: Callable[[DenoiseEngine], Awaitable[Any]], budget: int = 64) -> Any:
    """Do it with a running engine, which holds nothing afterwards."""

    async def main() -> Any:
        engine = DenoiseEngine(StageContext("tiny", "tiny_denoise:Tiny", args={"budget": budget}))
        await engine.start()
        try:
            result = await work(engine)
            for _ in range(200):
                if not any(engine.held().values()):
                    break
                await asyncio.sleep(0.01)
            assert not any(engine.held().values())
            return result
        finally:
            await engine.stop()

    return asyncio.run(main())


async def make(engine: DenoiseEngine, **params: Any) -> list[str]:
    return [payload.data async for payload in engine.stream(Job("job", params), nothing())]


def calls(engine: DenoiseEngine) -> list[list[float]]:
    seen: list[list[float]] = engine._module.calls  # type: ignore[attr-defined]
    return seen


def test_rows_of_one_request_and_of_others_share_steps() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        return await asyncio.gather(make(engine, to=1, rows=3), make(engine, to=2, steps=7), make(engine, to=3, tokens=9)), calls(engine)

    (one, two, three), seen = run(work)
    assert (one, two, three) == (["1.000"] * 3, ["2.000"], ["3.000"])
    assert max(map(len, seen)) >= 3
    assert sum(map(len, seen)) == 3 * 4 + 7 + 4, "a row was computed twice"


def test_a_short_row_does_not_wait_for_a_long_one() -> None:
    """The long one's step has a thousand slices, the short one's a single one; they do not share, and both end."""

    async def work(engine: DenoiseEngine) -> Any:
        long = asyncio.create_task(make(engine, to=1, tokens=1000, steps=3, slices=1000))
        while not engine.held()["rows"]:
            await asyncio.sleep(0)
        short = await make(engine, to=2)
        over = long.done()
        return short, over, await long, calls(engine)

    short, over, long, seen = run(work)
    assert (short, long) == (["2.000"], ["1.000"])
    assert not over, "the short one was not first"
    assert [1, 2] not in seen and [2, 1] not in seen


def test_who_may_share_waits_for_the_forward_under_way() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        first = asyncio.create_task(make(engine, to=1, steps=2000, slices=50))
        while not engine.held()["rows"]:
            await asyncio.sleep(0)
        await make(engine, to=2, steps=3, slices=50)
        first.cancel()
        return calls(engine)

    seen = run(work)
    assert [1, 2] in seen and [2] not in seen, seen


def test_the_row_at_fault_fails_alone() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        tasks = [make(engine, to=1, steps=6), make(engine, to=2, fail=True), make(engine, to=3, rows=2)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    one, two, three = run(work)
    assert (one, three) == (["1.000"], ["3.000"] * 2)
    assert isinstance(two, ValueError) and str(two) == "it fails"


def test_a_refused_request_and_one_without_rows() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        with pytest.raises(RequestError, match="'to' is below 0"):
            await make(engine, to=-1)
        return await make(engine, to=1, rows=0)

    assert run(work) == []


def test_an_abort_frees_its_rows_at_the_next_step() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        task = asyncio.create_task(make(engine, to=1, steps=20_000))
        while not engine.held()["rows"]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await make(engine, to=2)

    assert run(work) == ["2.000"]
