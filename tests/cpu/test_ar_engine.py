"""The AR engine in this process: its answers are stock vLLM's, whatever else is under way, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import talk
from holding import nothing_held

from vllm_omni.engine import ARModule
from vllm_omni.errors import RequestError, StageError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import text
from vllm_omni.request import Message, Request

GREEDY = talk.GREEDY
PROMPTS = talk.PROMPTS


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def omni(loop: asyncio.Runner, tiny: Path) -> Iterator[AsyncOmni]:
    """The tiny model, running in this process."""
    running = AsyncOmni(talk.deployment(tiny), inline=True)
    loop.run(running.start())
    yield running
    loop.run(running.stop())


Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture
def run(loop: asyncio.Runner, omni: AsyncOmni) -> Iterator[Run]:
    """Awaits something within a time limit. Afterwards nothing is held."""

    async def bounded(work: Awaitable[Any]) -> Any:
        async with asyncio.timeout(60):
            return await work

    yield lambda work: loop.run(bounded(work))
    loop.run(bounded(nothing_held(omni)))


def test_answers_through_the_whole_stack_are_stock_vllms(omni: AsyncOmni, run: Run, tiny: Path, stock: dict[str, list[int]]) -> None:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(omni.generate(prompt, max_tokens=60, **GREEDY) for prompt in PROMPTS))

    answers = run(all_at_once())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert answer.text == tokenizer.decode(stock[prompt][:60], skip_special_tokens=True)
        assert sum(payload.meta["tokens"] for payload in answer.payloads) == 60
        assert answer.payloads[-1].meta["finish_reason"] == "length"
        assert len(answer.payloads) > 2, "it streams"


def test_two_hundred_aborts_in_mid_generation_leave_nothing(omni: AsyncOmni, run: Run) -> None:
    random.seed(0)

    async def aborted(number: int) -> int:
        chunks = omni.stream(f"abort {number}", max_tokens=400, **GREEDY)
        wanted, seen = random.randrange(1, 12), 0
        async for _ in chunks:
            seen += 1
            if seen == wanted:
                break
        await chunks.aclose()
        return seen

    async def all_of_them() -> None:
        held = 0.0
        for start in range(0, 200, 50):
            work = asyncio.gather(*(aborted(start + number) for number in range(50)))
            while not work.done():
                await asyncio.sleep(0.005)
                held = max(held, (await omni.stats())["talker.0"]["kv_blocks"])
            assert all(await work)
        assert held > 10, "blocks were in use when it happened"

    run(all_of_them())


def test_aborts_while_a_prompt_is_read_or_has_just_come(omni: AsyncOmni, run: Run) -> None:
    async def main() -> None:
        work = [asyncio.create_task(omni.generate("x " * 100, max_tokens=400, **GREEDY)) for _ in range(40)]
        for number, task in enumerate(work):
            if number % 3:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert (await omni.generate("and then", max_tokens=3)).text

    run(main())


def test_a_seed_makes_an_answer_its_own_whoever_is_beside_it(omni: AsyncOmni, run: Run) -> None:
    async def main() -> None:
        alone = (await omni.generate("a", seed=7, temperature=1.0, max_tokens=30)).text
        beside = [omni.generate("a", seed=seed, temperature=1.0, max_tokens=30) for seed in (7, 8, 9)]
        same, *others = [answer.text for answer in await asyncio.gather(*beside)]
        assert same == alone
        assert all(other != alone for other in others)

    run(main())


def test_an_answer_ends_before_a_stop_text(omni: AsyncOmni, run: Run) -> None:
    async def main() -> None:
        whole = (await omni.generate("stop", max_tokens=40, **GREEDY)).text
        word = whole.split(" ")[5]
        answer = await omni.generate("stop", max_tokens=40, stop=[word], **GREEDY)
        assert answer.text == whole[: whole.index(word)]
        assert answer.payloads[-1].meta["finish_reason"] == "stop"

    run(main())


REFUSED = {
    "temperature": (-0.5, "at least 0"), "top_p": (0.0, "top_p"), "min_tokens": (9, "min_tokens"), "top_k": (-7, "top_k"),
    "stop": ([""], "stop"), "stop_token_ids": (["x"], "list of int"), "max_tokens": (0, "at least 1"), "seed": (2**63, "at most"),
}  # fmt: skip


@pytest.mark.parametrize("stop", [[["a"]], [{"a": 1}], [1]])
def test_a_stop_that_is_no_text_is_refused_before_it_can_stop_the_engine(stop: list[Any], omni: AsyncOmni, run: Run) -> None:
    with pytest.raises(RequestError, match="list of str"):
        run(omni.generate("a", stop=stop, max_tokens=8))
    assert run(omni.generate("a", max_tokens=3)).text


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"min_tokens": 2**30}, "at most 512"),
        ({"stop_token_ids": list(range(200))}, "at most 100"),
        ({"stop": ["x"] * 101}, "at most 100 texts"),
        ({"stop": ["x" * 6_000, "y" * 6_000]}, "10000 characters"),
    ],
)
def test_what_would_break_a_step_is_refused_before(params: dict[str, Any], says: str, omni: AsyncOmni, run: Run) -> None:
    with pytest.raises(RequestError, match=says):
        run(omni.generate("a", **params))


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_cannot_be_used_is_refused_by_name(name: str, omni: AsyncOmni, run: Run) -> None:
    value, says = REFUSED[name]
    with pytest.raises(RequestError, match=says):
        run(omni.generate("a", **{"max_tokens": 5, name: value}))


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(omni: AsyncOmni, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prompt = ARModule.prompt
    monkeypatch.setattr(ARModule, "prompt", lambda module, job, parts, tokenizer: read.append(1) or prompt(module, job, parts, tokenizer))
    with pytest.raises(RequestError, match="5000000 characters; 512 tokens of context") as caught:
        run(omni.generate("x" * 5_000_000))
    assert caught.value.param == "messages"
    assert not read
    assert run(omni.generate("x", max_tokens=2)).text
    assert read


def test_half_a_surrogate_pair_is_no_prompt(omni: AsyncOmni, run: Run) -> None:
    with pytest.raises(RequestError, match="no text"):
        run(omni.generate("ab\ud800"))


def test_whatever_is_raised_while_a_prompt_is_read_ends_its_request_alone(
    omni: AsyncOmni, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer written in Rust panics with what is no Exception."""

    def panic(*_: Any) -> list[int]:
        raise BaseException("panicked")

    with monkeypatch.context() as broken:
        broken.setattr(ARModule, "prompt", panic)
        with pytest.raises(StageError, match="panicked"):
            run(omni.generate("x"))
    assert run(omni.generate("x", max_tokens=2)).text


def test_a_prompt_that_does_not_fit_is_refused_and_others_are_not(omni: AsyncOmni, run: Run) -> None:
    async def main() -> None:
        long, short = omni.generate("word " * 2000), omni.generate("a", max_tokens=20, **GREEDY)
        refused, answer = await asyncio.gather(long, short, return_exceptions=True)
        assert isinstance(refused, RequestError)
        assert "512" in refused.message, "it says how long a prompt may be"
        assert answer.payloads[-1].meta["tokens"]

    run(main())


def test_the_context_ends_an_answer_without_a_limit(omni: AsyncOmni, run: Run) -> None:
    answer = run(omni.generate("a", **GREEDY))
    assert sum(payload.meta["tokens"] for payload in answer.payloads) + answer.payloads[0].meta["prompt_tokens"] == 512
    assert answer.payloads[-1].meta["finish_reason"] == "length"


def test_a_conversation_follows_the_checkpoints_template(omni: AsyncOmni, run: Run) -> None:
    async def said(*messages: tuple[str, str]) -> int:
        request = Request(messages=tuple(Message(role, (text(content),)) for role, content in messages), params={"max_tokens": 1})
        return (await omni.generate(request)).payloads[0].meta["prompt_tokens"]

    async def main() -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(omni.deployment.folder)
        turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
        shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + "<|im_start|>assistant\n"
        assert await said(*turns) == len(tokenizer.encode(shown, add_special_tokens=False))
        assert await said(("developer", "be brief"), ("user", "a")) == await said(("system", "be brief"), ("user", "a"))

    run(main())


def test_a_prompt_is_read_in_another_thread_than_the_one_that_generates(omni: AsyncOmni, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one that takes long does not hold up the tokens of others: they go on while it is read."""
    prompt = ARModule.prompt

    def slow(module: ARModule, job: Any, parts: Any, tokenizer: Any) -> list[int]:
        if parts[0].data == "long":
            return list(tokenizer.encode("word " * 300_000))
        return prompt(module, job, parts, tokenizer)

    monkeypatch.setattr(ARModule, "prompt", slow)

    async def main() -> None:
        chunks = omni.stream("a", max_tokens=450, **GREEDY)
        await anext(chunks)
        reading = asyncio.create_task(omni.generate("long"))
        before = 0
        async for payload in chunks:
            before += 0 if reading.done() else payload.meta["tokens"]
        assert before > 20
        with pytest.raises(RequestError):
            await reading

    run(main())
