"""Echo through the whole core: each stage in a process of its own, and the answer the same as with all of them in this one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from vllm_omni import discovery
from vllm_omni.errors import AbortedError, DeadlineError, RequestError, StageError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import AUDIO, IMAGE, TEXT, Payload, image, text
from vllm_omni.request import Message, Request
from vllm_omni.samples import samples
from vllm_omni.testing.chunks import assert_same, by_kind
from vllm_omni.testing.prove import contract_claims
from vllm_omni.testing.runs import assert_freed, collect, one_by_one, using

Result = TypeVar("Result")
ALL = (TEXT, AUDIO, IMAGE)


def ask(*content: str | Payload, outputs: tuple[Any, ...] = ALL, timeout: float | None = None, **params: object) -> Request:
    parts = tuple(text(part) if isinstance(part, str) else part for part in content)
    return Request(messages=(Message("user", parts),), outputs=outputs, params=params, timeout=timeout)


def in_processes(work: Callable[[AsyncOmni], Awaitable[Result]], *settings: str) -> Result:
    async def run() -> Result:
        async with AsyncOmni("echo", settings=settings) as omni:
            result = await work(omni)
            await assert_freed(omni)
            return result

    return asyncio.run(run())


REQUESTS = [
    ask("three words here"),
    ask("what is this", *(samples()[kind] for kind in (IMAGE, AUDIO)), voice="saw", speed=2.0, seed=7),
    ask("only the picture\nof two lines", samples()[IMAGE], outputs=(IMAGE,)),
    ask("only sound", outputs=(AUDIO,), voice="square"),
    ask("cut after two", max_tokens=2),
    ask(samples()[AUDIO]),
]


def test_processes_give_what_one_process_gives() -> None:
    async def work(omni: AsyncOmni) -> list[list[Payload]]:
        answers = await one_by_one(omni, REQUESTS)  # their arrays lie in memory that the stages lend: what is kept is copied
        return [[Payload(c.kind, c.data if c.kind == TEXT else c.data.copy(), c.meta) for c in answer] for answer in answers]

    inline = using("echo", work)
    apart = in_processes(work)
    for request, one, other in zip(REQUESTS, inline, apart, strict=True):
        assert set(by_kind(one)) == {kind.name for kind in request.outputs}
        assert_same(by_kind(other), by_kind(one))
        assert [chunk.meta for chunk in other if chunk.kind == TEXT] == [chunk.meta for chunk in one if chunk.kind == TEXT]


def test_many_at_once_equal_each_alone() -> None:
    async def work(omni: AsyncOmni) -> None:
        alone = await one_by_one(omni, REQUESTS)
        for _ in range(3):
            together = await asyncio.gather(*(collect(omni, request) for request in REQUESTS))
            for one, other in zip(alone, together, strict=True):
                assert_same(by_kind(other), by_kind(one))

    in_processes(work)


def test_the_singer_sings_while_the_speaker_speaks() -> None:
    async def work(omni: AsyncOmni) -> list[str]:
        return [chunk.kind.name async for chunk in omni.stream(ask("one two three four", delay_ms=100.0))]

    order = in_processes(work)
    last_text = len(order) - 1 - order[::-1].index("text")
    assert order.index("audio") < last_text < order.index("image")
    assert order.count("text") == order.count("audio") == 4


@pytest.mark.parametrize("settings", [(), ("edges.speaker->painter.window=1KiB", "edges.speaker->singer.window=1KiB")])
def test_wide_rows_change_nothing_and_narrow_windows_do_not_lock(settings: tuple[str, ...]) -> None:
    words = "a b c d e f g h"

    async def work(omni: AsyncOmni) -> None:
        narrow, wide = await collect(omni, ask(words)), await collect(omni, ask(words, array_kib=2048))
        assert_same(by_kind(wide), by_kind(narrow))

    in_processes(work, *settings)


@pytest.mark.parametrize("param", ["fail_at", "fail_singing_at"])
def test_a_failure_ends_its_request_alone(param: str) -> None:
    async def work(omni: AsyncOmni) -> None:
        good, bad = ask("one two three"), ask("one two three", **{param: 1})
        expected = by_kind(await collect(omni, good))
        answers = await asyncio.gather(*(collect(omni, request) for request in [good, bad] * 8), return_exceptions=True)
        for answer in answers[0::2]:
            assert not isinstance(answer, BaseException)
            assert_same(by_kind(answer), expected)
        for answer in answers[1::2]:
            assert isinstance(answer, StageError)
            assert answer.stage == {"fail_at": "speaker", "fail_singing_at": "singer"}[param]
            assert "word 1" in answer.message
        assert_same(by_kind(await collect(omni, good)), expected)

    in_processes(work)


def test_abort_close_and_deadline_free_every_stage() -> None:
    slow = "word " * 1000

    async def until(stream: AsyncIterator[Payload], kind: Any) -> None:
        async for chunk in stream:
            if chunk.kind == kind:
                return

    async def work(omni: AsyncOmni) -> None:
        stream = omni.stream(ask(slow, delay_ms=20.0))
        await until(stream, AUDIO)
        await stream.aclose()
        await assert_freed(omni)

        named = ask(slow, delay_ms=20.0)
        stream = omni.stream(named)
        await until(stream, AUDIO)
        assert await omni.abort(named.id)
        with pytest.raises(AbortedError):
            await until(stream, IMAGE)
        assert not await omni.abort(named.id)
        await assert_freed(omni)

        with pytest.raises(DeadlineError):
            await collect(omni, ask(slow, delay_ms=20.0, timeout=0.2))
        assert by_kind(await collect(omni, ask("still here", outputs=(TEXT,))))["text"] == "still here"

    in_processes(work)


@pytest.mark.parametrize(
    ("request_", "param", "said"),
    [
        (ask(" \n\t"), "messages", "nothing to say"),
        (ask(), "messages", "needs an input"),
        (ask("x " * 10_000), "messages", "16384 characters"),
        (ask("hi", voice="alto"), "voice", "sine, square, triangle, saw, alloy"),
        (ask("hi", speed=9.0), "speed", "at most 4"),
        (ask("hi", sede=1), "sede", "Did you mean 'seed'"),
        (ask("hi", outputs=(TEXT,), voice="saw"), "voice", "no effect"),
        (ask("hi", max_tokens=0), "max_tokens", "at least 1"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(request_: Request, param: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        using("echo", lambda omni: collect(omni, request_))
    assert caught.value.param == param


def test_what_the_client_sends_shows_in_what_it_gets() -> None:
    loud = np.full(16_000, 0.9, np.float32)
    sound = Payload(AUDIO, loud, {"rate": 16_000})
    red = np.zeros((4, 4, 3), np.uint8)
    red[:, :, 0] = 200

    async def work(omni: AsyncOmni) -> None:
        got = by_kind(await collect(omni, ask("see", image(red), "hear", sound)))
        assert got["text"] == "see image:4x4 hear audio:1.00s"
        assert np.abs(got["audio"]).max() == pytest.approx(0.9, rel=0.02)
        assert got["image"][0][0, 0].tolist() == [200, 0, 0]

    asyncio.run(_inline(work))


async def _inline(work: Callable[[AsyncOmni], Awaitable[None]]) -> None:
    async with AsyncOmni("echo", inline=True) as omni:
        await work(omni)
        await assert_freed(omni)


def test_its_proof_is_of_this_version_and_of_the_whole_contract() -> None:
    found = discovery.find("echo", discovery.ALIASES)
    assert found is not None
    proof = json.loads((Path(__file__).parents[2] / "model_plugins/echo/proof.json").read_text())
    assert proof["version"] == found.version
    assert (set(proof["claims"]), proof["maturity"]) == (contract_claims(), "beta")
    assert found.maturity() == "beta"
