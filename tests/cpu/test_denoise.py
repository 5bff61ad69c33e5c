"""The Denoise engine: who shares a forward, who waits for whom, and what happens to whom if something goes wrong."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from vllm_omni.engine import Job, StageContext
from vllm_omni.engines.denoise import DenoiseEngine
from vllm_omni.errors import RequestError, SettingError
from vllm_omni.payload import PROGRESS, TEXT, Kind, Payload


async def nothing() -> AsyncIterator[Payload]:
    for payload in ():
        yield payload


def held(engine: DenoiseEngine) -> dict[str, int]:
    """What is held for jobs, that is not zero."""
    return {name: count for name, count in engine.held().items() if count and not name.endswith("_bytes")}


async def begun(engine: DenoiseEngine, task: asyncio.Task[Any]) -> None:
    """Wait until the engine has rows of this task, which is to go on for long."""
    while not engine.held()["rows"]:
        assert not task.done(), "it was over too soon"
        await asyncio.sleep(0)


def run(work: Callable[[DenoiseEngine], Awaitable[Any]], budget: int = 64, mib: float | None = None) -> Any:
    """Do it with a running engine, of `mib` MiB for tokens of one MiB each, which holds nothing afterwards."""
    memory, limit = ("tiny_denoise:memory", mib / 1024) if mib else ("", None)

    async def main() -> Any:
        engine = DenoiseEngine(StageContext("tiny", "tiny_denoise:Tiny", args={"budget": budget, "memory_gib": limit}, memory=memory))
        await engine.start()
        try:
            result = await work(engine)
            for _ in range(200):
                if not held(engine):
                    break
                await asyncio.sleep(0.01)
            assert not held(engine)
            return result
        finally:
            await engine.stop()

    return asyncio.run(main())


async def make(engine: DenoiseEngine, **params: Any) -> list[str]:
    return [payload.data for payload in await payloads(engine, **params)]


async def payloads(engine: DenoiseEngine, *wants: Kind, **params: Any) -> list[Payload]:
    return [payload async for payload in engine.stream(Job("job", params, wants), nothing())]


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
    """The long one's step has a million slices, the short one's a single one; they do not share."""

    async def work(engine: DenoiseEngine) -> Any:
        long = asyncio.create_task(make(engine, to=1, tokens=1000, steps=3, slices=1_000_000))
        await begun(engine, long)
        short = await make(engine, to=2)
        over = long.done()
        long.cancel()
        return short, over, calls(engine)

    short, over, seen = run(work)
    assert short == ["2.000"]
    assert not over, "the short one was not first"
    assert [1, 2] not in seen and [2, 1] not in seen


def test_who_may_share_waits_for_the_forward_under_way() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        first = asyncio.create_task(make(engine, to=1, steps=100_000, slices=50))
        await begun(engine, first)
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
        task = asyncio.create_task(make(engine, to=1, steps=100_000))
        await begun(engine, task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await make(engine, to=2)

    assert run(work) == ["2.000"]


def test_a_long_preparation_holds_up_nobody() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        late = asyncio.create_task(make(engine, to=1, late=100_000_000))
        await asyncio.sleep(0)
        short = await make(engine, to=2)
        over = late.done()
        late.cancel()
        return short, over

    assert run(work) == (["2.000"], False)


def test_previews_are_what_the_sample_is_predicted_to_become() -> None:
    made = run(lambda engine: payloads(engine, to=8, steps=4, previews=(3, 1)))
    assert [(payload.data, payload.meta.get("partial")) for payload in made] == [("8.000", 0), ("8.000", 1), ("8.000", None)]


def test_progress_is_told_to_who_wants_it_and_grows() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        return await payloads(engine, PROGRESS, to=1, steps=20_000, rows=2), await payloads(engine, to=1, steps=2)

    *told, one, two = (made := run(work))[0]
    assert [payload.kind for payload in (one, two)] == [TEXT, TEXT]
    counts = [payload.meta["done"] for payload in told]
    assert counts == sorted(set(counts)) and 0 < counts[0] < counts[-1] < 40_000, counts
    assert {payload.kind for payload in told} == {PROGRESS} and {payload.meta["total"] for payload in told} == {40_000}
    assert [payload.kind for payload in made[1]] == [TEXT]


def test_a_job_that_never_fits_is_refused_with_the_arithmetic() -> None:
    async def work(engine: DenoiseEngine) -> Any:
        with pytest.raises(RequestError) as wrong:
            await make(engine, to=1, tokens=90)
        assert wrong.value.message.startswith("This needs 91.0 MiB beside the 10.0 MiB of the weights, and both may fill 100.0 MiB: ask")
        assert wrong.value.param == "size"
        return await make(engine, to=1, tokens=89)

    assert run(work, mib=100) == ["1.000"]


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    needs = "10.0 MiB for its weights and 2.0 MiB for the smallest request"
    says = f"Stage 'tiny' needs {needs}, and 11.0 MiB may be used on cpu. Nothing was loaded."
    with pytest.raises(SettingError) as wrong:
        run(lambda engine: make(engine, to=1), mib=11)
    assert wrong.value.message == says


def test_jobs_wait_for_memory_and_a_small_one_passes_a_large_one_that_waits_anyway() -> None:
    """100 MiB: 10 are weights, 1 a forward. Beside 50, one of 60 waits, and one of 20 may pass it; one of 30 would be in its way."""

    async def work(engine: DenoiseEngine) -> Any:
        order: list[int] = []

        async def one(number: int, **params: Any) -> None:
            await make(engine, to=number, **params)
            order.append(number)

        first = asyncio.create_task(one(1, tokens=50, steps=50_000))
        await begun(engine, first)
        rest = [asyncio.create_task(one(2, tokens=60)), asyncio.create_task(one(3, tokens=20)), asyncio.create_task(one(4, tokens=30))]
        while engine.held()["jobs_waiting"] < 2 or 3 not in order:
            assert not first.done(), "it was over too soon"
            await asyncio.sleep(0)
            assert engine.held()["used_bytes"] <= engine.held()["limit_bytes"] == 100 << 20
        cancelled = asyncio.create_task(one(5, tokens=60))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(first, *rest)
        return order

    assert run(work, mib=100) == [3, 1, 2, 4]


def test_an_engine_that_was_stopped_lets_go_of_its_weights() -> None:
    seen: list[weakref.ref[Any]] = []
    kept: list[DenoiseEngine] = []

    async def work(engine: DenoiseEngine) -> None:
        kept.append(engine)
        seen.append(weakref.ref(engine._module))
        await make(engine, to=1)

    run(work)
    assert kept and seen[0]() is None


def test_nothing_of_a_row_waits_for_a_garbage_collection() -> None:
    """Whether it ended or was aborted: on a device it is memory that the next one needs."""
    seen: list[weakref.ref[Any]] = []

    async def work(engine: DenoiseEngine) -> list[bool]:
        make_row = engine._module.prepare

        def watched(*args: Any) -> Any:
            for row in make_row(*args):
                seen.append(weakref.ref(row.solver.table))
                yield row

        engine._module.prepare = watched  # type: ignore[method-assign]
        await asyncio.gather(make(engine, to=1, rows=2), make(engine, to=2, steps=7))
        task = asyncio.create_task(make(engine, to=1, steps=100_000))
        await begun(engine, task)
        task.cancel()
        await asyncio.sleep(0.2)
        return [row() is None for row in seen]

    gc.disable()
    try:
        assert run(work) == [True] * 4
    finally:
        gc.enable()
