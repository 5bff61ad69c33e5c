"""Requests through a whole graph: streaming, joins, aborts, failures. Every test runs in one process and with a process per stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import numpy
import pytest
from holding import nothing_held

from vllm_omni.errors import AbortedError, DeadlineError, RequestError, SettingError, StageError
from vllm_omni.omni import AsyncOmni, Omni
from vllm_omni.payload import ACTION, AUDIO, IMAGE, TEXT, Payload, image, text
from vllm_omni.request import Message, Request

Run = Callable[[Callable[[AsyncOmni], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=[True, False], ids=["inline", "processes"])
def run(request: pytest.FixtureRequest) -> Run:
    def go(body: Callable[[AsyncOmni], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), AsyncOmni("echo", inline=request.param) as omni:
                await body(omni)
                assert len(await omni.stats()) == 1 + len(omni.health().stages), "all processes tell"
                await nothing_held(omni)

        asyncio.run(main())

    return go


def test_a_request_gives_all_its_outputs(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        result = await omni.generate("one two three", (TEXT, AUDIO, IMAGE))
        assert result.text == "one two three"
        assert result.rate == 24_000 and result.audio.dtype == numpy.float32 and len(result.audio) == 3 * 0.12 * 24_000
        assert numpy.abs(result.audio).max() > 0.1
        assert len(result.images) == 1 and result.images[0].dtype == numpy.uint8 and result.images[0].std() > 10
        assert {"speaker", "singer", "painter"} == set(result.timeline)
        times = result.timeline["singer"]
        assert 0 < times.queued <= times.first <= times.done

    run(body)


def test_only_the_stages_that_are_needed_work(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        result = await omni.generate("one two")
        assert [payload.kind for payload in result.payloads] == [TEXT, TEXT]
        assert set(result.timeline) == {"speaker"}

    run(body)


def test_a_downstream_stage_starts_while_the_upstream_one_produces(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        result = await omni.generate("a b c d e f", (TEXT, AUDIO), delay_ms=10.0)
        assert result.timeline["singer"].first < result.timeline["speaker"].done
        kinds = [payload.kind for payload in result.payloads]
        assert kinds.index(AUDIO) < len(kinds) - 1 - kinds[::-1].index(TEXT)

    run(body)


def test_an_optional_branch_joins_when_its_input_is_there(run: Run) -> None:
    red = image(numpy.full((8, 8, 3), (255, 0, 0), numpy.uint8))

    async def body(omni: AsyncOmni) -> None:
        plain = await omni.generate(Request.of("hello", outputs=(IMAGE,)))
        request = Request(messages=(Message("user", (red, text("hello"))),), outputs=(IMAGE,))
        coloured = await omni.generate(request)
        while "listener" not in coloured.timeline:  # it may tell that it is done when the picture is already there
            await asyncio.sleep(0.001)
        assert "listener" not in plain.timeline
        assert not numpy.array_equal(plain.images[0], coloured.images[0])

    run(body)


def test_concurrent_requests_equal_their_solo_runs(run: Run) -> None:
    """F080: a batch of different texts gives different outputs, each its own."""

    async def body(omni: AsyncOmni) -> None:
        prompts = [f"request number {index} " + "la " * index for index in range(12)]
        solo = [await omni.generate(prompt, (TEXT, AUDIO, IMAGE), seed=index) for index, prompt in enumerate(prompts)]
        together = await asyncio.gather(*(omni.generate(prompt, (TEXT, AUDIO, IMAGE), seed=index) for index, prompt in enumerate(prompts)))
        for one, other in zip(solo, together, strict=True):
            assert one.text == other.text
            assert numpy.array_equal(one.audio, other.audio)
            assert numpy.array_equal(one.images[0], other.images[0])
        assert len({one.audio.tobytes() for one in solo}) == 12

    run(body)


def test_large_arrays_cross_the_private_edge(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        small = await omni.generate("a b c", (AUDIO,))
        large = await omni.generate("a b c", (AUDIO,), array_kib=4096)
        assert numpy.array_equal(small.audio, large.audio)

    run(body)


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        (lambda: Request.of("x", params={"voise": "sine"}), "voise", "Did you mean 'voice'"),
        (lambda: Request.of("x", outputs=(AUDIO,), params={"voice": "bagpipe"}), "voice", "must be one of sine"),
        (lambda: Request.of("x", params={"max_tokens": 0}), "max_tokens", "at least 1"),
        (lambda: Request.of("x", params={"max_tokens": "3"}), "max_tokens", "of type int"),
        (lambda: Request.of("x", params={"voice": "sine"}), "voice", "no effect on the output asked for"),
        (lambda: Request.of("x", outputs=(ACTION,)), "modalities", "cannot give 'action'"),
        (lambda: Request(messages=()), "messages", "needs an input"),
    ],
    ids=["unknown", "choice", "bound", "type", "no effect", "output", "nothing given"],
)
def test_a_bad_request_fails_alone(run: Run, request_: Callable[[], Request], param: str | None, says: str) -> None:
    async def body(omni: AsyncOmni) -> None:
        good = asyncio.create_task(omni.generate("a b c d", (TEXT, AUDIO), delay_ms=5.0))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match=says) as caught:
            await omni.generate(request_())
        assert param is None or caught.value.param == param
        assert (await good).text == "a b c d"

    run(body)


@pytest.mark.parametrize("switch", ["fail_at", "fail_singing_at"])
def test_a_failing_request_fails_alone(run: Run, switch: str) -> None:
    async def body(omni: AsyncOmni) -> None:
        good = [asyncio.create_task(omni.generate("a b c d", (TEXT, AUDIO), delay_ms=2.0, seed=seed)) for seed in range(6)]
        bad = [asyncio.create_task(omni.generate("a b c d", (TEXT, AUDIO), delay_ms=2.0, **{switch: 2})) for _ in range(3)]
        solo = await omni.generate("a b c d", (AUDIO,), seed=3)
        for task in bad:
            with pytest.raises(StageError, match="failed") as caught:
                await task
            assert caught.value.stage == ("speaker" if switch == "fail_at" else "singer")
        results = await asyncio.gather(*good)
        assert all(result.text == "a b c d" for result in results)
        assert numpy.array_equal(results[3].audio, solo.audio)

    run(body)


def test_closing_the_stream_aborts_in_every_stage(run: Run) -> None:
    """F106: generation stops within one chunk."""

    async def body(omni: AsyncOmni) -> None:
        async with aclosing(omni.stream(Request.of("la " * 500, outputs=(TEXT, AUDIO, IMAGE), params={"delay_ms": 5.0}))) as chunks:
            async for _ in chunks:
                break
        await nothing_held(omni)

    run(body)


def test_abort_by_id(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        request = Request.of("la " * 500, outputs=(TEXT, AUDIO), params={"delay_ms": 5.0})
        working = asyncio.create_task(omni.generate(request))
        await asyncio.sleep(0.05)
        assert await omni.abort(request.id)
        with pytest.raises(AbortedError):
            await working
        assert not await omni.abort(request.id)

    run(body)


def test_a_cancelled_task_aborts(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        working = asyncio.create_task(omni.generate("la " * 500, (AUDIO,), delay_ms=5.0))
        await asyncio.sleep(0.05)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    run(body)


def test_a_deadline_ends_a_request_with_its_own_error(run: Run) -> None:
    """F104: nothing of a timed-out request is kept."""

    async def body(omni: AsyncOmni) -> None:
        with pytest.raises(DeadlineError, match=r"limit of 0\.05 s"):
            await omni.generate(Request.of("la " * 500, params={"delay_ms": 5.0}, timeout=0.05))

    run(body)


def test_two_requests_of_one_id_are_not_mixed(run: Run) -> None:
    """F110."""

    async def body(omni: AsyncOmni) -> None:
        first = asyncio.create_task(omni.generate(Request.of("a b c", id="same", params={"delay_ms": 20.0})))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="must be unique"):
            await omni.generate(Request.of("d e f", id="same"))
        assert (await first).text == "a b c"
        assert (await omni.generate(Request.of("d e f", id="same"))).text == "d e f"

    run(body)


def test_a_slow_client_holds_the_producer(run: Run) -> None:
    """Bytes in flight are bounded: the speaker has not finished while its text waits for the client."""

    async def body(omni: AsyncOmni) -> None:
        request = Request.of("x " * 200, outputs=(AUDIO,), params={"array_kib": 4096})
        async with aclosing(omni.stream(request)) as chunks:
            await anext(chunks)
            await asyncio.sleep(0.1)
            held = await omni.stats()
            assert held["speaker.0"].get("leased_blocks", 0) * (4 << 20) <= 80 << 20

    run(body)


def test_an_abort_and_a_deadline_free_all_though_the_reader_sleeps(run: Run) -> None:
    """F106, with a client that is stuck: nothing waits for its next read."""

    async def body(omni: AsyncOmni) -> None:
        endless = {"text": "la " * 500, "params": {"delay_ms": 5.0}}
        for timeout, error in ((None, AbortedError), (0.2, DeadlineError)):
            request = Request.of(endless["text"], params=endless["params"], timeout=timeout)
            async with aclosing(omni.stream(request)) as chunks:
                await anext(chunks)
                if timeout is None:
                    assert await omni.abort(request.id)
                await nothing_held(omni)
                with pytest.raises(error):
                    await anext(chunks)

    run(body)


def test_an_id_can_be_used_again_at_once(run: Run) -> None:
    """Nothing that is still on its way for the aborted request is taken for the new one."""

    async def body(omni: AsyncOmni) -> None:
        for turn in range(30):
            chunks = omni.stream(Request.of("x " * 50, id="same", outputs=(TEXT, AUDIO), params={"array_kib": 64}))
            for _ in range(turn % 4):
                await anext(chunks)
            if turn % 2:
                await omni.abort("same")
            else:
                await chunks.aclose()
            result = await omni.generate(Request.of("a b c", id="same", outputs=(TEXT, AUDIO)))
            assert result.text == "a b c" and len(result.audio) == 3 * 0.12 * 24_000
            assert set(result.timeline) == {"speaker", "singer"}
            with pytest.raises((AbortedError, StopAsyncIteration)):
                await anext(chunks)

    run(body)


def test_stats_may_be_asked_for_by_several_at_once(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        asking = []
        for _ in range(100):  # some begin while others end
            asking.append(asyncio.create_task(omni.stats()))
            await asyncio.sleep(0.0002)
        for stats in await asyncio.gather(*asking):
            assert set(stats) == {"api", *omni.health().stages}

    run(body)


def said(data: object, **meta: object) -> Request:
    return Request(messages=(Message("user", (Payload(TEXT, data, meta),)),))


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        (lambda: said({"a": 1}), "messages", "Data of type dict cannot travel"),
        (lambda: said("x", some=numpy.float32(1)), "messages", "of type float32, which cannot travel"),
        (lambda: Request.of("x", params={"seed": 2**70}), "seed", "of 64 bits"),
        (lambda: Request.of("x", id="\ud800"), "id", "surrogate"),
        (lambda: Request.of("x", id=5), "id", "must be text"),
    ],
    ids=["data", "meta", "number", "id", "no id"],
)
def test_what_cannot_be_sent_is_the_requests_fault(run: Run, request_: Callable[[], Request], param: str, says: str) -> None:
    async def body(omni: AsyncOmni) -> None:
        with pytest.raises(RequestError, match=says) as caught:
            await omni.generate(request_())
        assert caught.value.param == param
        del caught

    run(body)


def test_half_a_surrogate_pair_is_text(run: Run) -> None:
    """JSON can say it; so can a client."""

    async def body(omni: AsyncOmni) -> None:
        assert (await omni.generate("a \ud83c b")).text == "a \ud83c b"

    run(body)


def test_a_model_is_started_once(run: Run) -> None:
    async def body(omni: AsyncOmni) -> None:
        with pytest.raises(RuntimeError, match="started already"):
            await omni.start()
        assert (await omni.generate("a")).text == "a"

    run(body)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "processes"])
def test_the_synchronous_twin(inline: bool) -> None:
    with Omni("echo", inline=inline, settings=["stages.singer.args.tone_ms=50"]) as omni:
        result = omni.generate("a b", ("text", "audio"), voice="square")
        assert result.text == "a b" and len(result.audio) == 2 * 0.05 * 24_000
        stream = omni.stream("a b c d", delay_ms=5.0)
        assert next(stream).data.strip() == "a"
        stream.close()
        assert omni.generate("a b", "text").text == "a b"
        with pytest.raises(RequestError, match="must be text or a Request, not list"):
            omni.generate([{"role": "user", "content": "a"}])  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="no kind of output 'sound'"):
            omni.generate("a", ("sound",))
        assert omni.health().ready


def test_a_connector_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(SettingError, match="'inline' cannot be used"):
        Omni("echo", settings=["edges.speaker->singer.connector=inline"])
    with pytest.raises(SettingError, match="'shm' cannot be used"):
        Omni("echo", inline=True, settings=["edges.speaker->singer.connector=shm"])


def test_the_async_twin_takes_a_prompt_too() -> None:
    async def main() -> None:
        async with AsyncOmni("echo", inline=True) as omni:
            assert [payload.data async for payload in omni.stream("a b", "text")] == ["a", " b"]

    asyncio.run(main())


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "processes"])
def test_the_synchronous_twin_is_for_several_threads(inline: bool) -> None:
    omni = Omni("echo", inline=inline)
    with ThreadPoolExecutor(8) as threads:
        prompts = [f"number {index}" for index in range(16)]
        assert [result.text for result in threads.map(omni.generate, prompts)] == prompts
        working = [threads.submit(omni.generate, "la " * 500, delay_ms=5.0) for _ in range(3)]
        while omni.stats()["api"]["requests"] < 3:
            pass
        for closing in [threads.submit(omni.close) for _ in range(3)]:
            closing.result(20)
        for future in working:
            with pytest.raises(AbortedError):
                future.result(20)
    for use in (lambda: omni.generate("a"), omni.stats):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert not omni.health().ready
