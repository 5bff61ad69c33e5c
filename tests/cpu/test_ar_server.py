"""A language model behind the server: OpenAI's client gets stock vLLM's answers; and a model that no plugin owns is vLLM's to serve."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import talk
from conftest import Running, Serve, free_port, until
from transformers import AutoTokenizer

GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


def asked(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def test_answers_are_stock_vllms_streamed_and_whole(talking: Running, tiny: Path, stock: dict[str, list[int]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    expected = {prompt: tokenizer.decode(ids, skip_special_tokens=True) for prompt, ids in stock.items()}

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> tuple[str, int, int]:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = await client.chat.completions.create(model="talk", messages=asked(prompt), max_tokens=120, **GREEDY, **options)
        if not stream:
            return answer.choices[0].message.content, answer.usage.completion_tokens, 1
        chunks = [chunk async for chunk in answer]
        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        return "".join(said), chunks[-1].usage.completion_tokens, len(said)

    async def main() -> None:
        async with talking.async_openai() as client:
            answers = await asyncio.gather(*(ask(client, prompt, stream) for prompt in expected for stream in (True, False)))
        for (streamed, tokens, chunks), (whole, count, _), right in zip(answers[::2], answers[1::2], expected.values(), strict=True):
            assert streamed == whole == right
            assert tokens == count == 120
            assert chunks > 2, "it streams"

    asyncio.run(main())


def test_one_stop_text_need_not_stand_in_a_list(talking: Running) -> None:
    create = talking.openai.chat.completions.create
    whole = create(model="talk", messages=asked("a"), max_tokens=40, **GREEDY).choices[0].message.content
    assert whole
    word = whole.split(" ")[4]
    for stop in (word, [word]):
        (choice,) = create(model="talk", messages=asked("a"), max_tokens=40, stop=stop, **GREEDY).choices
        assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(word)], "stop")


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("top_p", 0), ("stop", 7), ("logit_bias", {"1": 5}), ("n", 2), ("max_tokens", 0)]
)
def test_what_cannot_be_used_is_refused_by_name(field: str, value: Any, talking: Running) -> None:
    body = {"model": "talk", "messages": asked("a"), field: value}
    answer = talking.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field, answer.text


def test_a_conversation_that_is_too_long_says_how_long_it_may_be(talking: Running) -> None:
    answer = talking.http.post("/v1/chat/completions", json={"messages": asked("word " * 2000)})
    assert answer.status_code == 400
    assert "512" in answer.json()["error"]["message"]


def test_clients_that_leave_free_their_blocks(talking: Running) -> None:
    async def leave(client: openai.AsyncOpenAI, number: int) -> None:
        create: Any = client.chat.completions.create
        async with await create(model="talk", messages=asked(f"{number}"), max_tokens=450, stream=True, **GREEDY) as answer:
            async for _ in answer:
                return

    async def main() -> None:
        async with talking.async_openai() as client:
            await asyncio.gather(*(leave(client, number) for number in range(40)))

    asyncio.run(main())
    until(lambda: not talking.held())
    assert 'vllm_omni_process_kv_blocks{process="talker.0"}' in talking.gauges()


def test_a_stage_that_is_killed_comes_back_and_answers(talking: Running) -> None:
    stage = next(child for child in psutil.Process(talking.process.pid).children(recursive=True) if child.name() == "talker.0")
    stage.send_signal(signal.SIGKILL)
    until(lambda: talking.http.get("/health").status_code == 503)
    talking.wait_ready()
    assert talking.openai.chat.completions.create(model="talk", messages=asked("a"), max_tokens=3).choices[0].message.content


def test_a_model_that_nobody_owns_is_handed_to_vllms_own_server(serve: Serve, tiny: Path) -> None:
    small = {**talk.SMALL, "served_model_name": "plain"}
    small.pop("use_tqdm_on_load")
    with serve(str(tiny), *[word for flag in talk.flags(**small) for word in flag.split("=")], env=os.environ) as running:
        running.wait_ready()
        assert "vllm.entrypoints.openai.api_server" in " ".join(psutil.Process(running.process.pid).cmdline())
        answer = running.openai.completions.create(model="plain", prompt="a", max_tokens=3)  # an endpoint that is vLLM's alone
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        running.signal(signal.SIGTERM)  # its engine is a process that would survive its being killed


@pytest.mark.parametrize("flag", ["--recipe=x", "--set=talker.replicas=2", "--graph=full", "--request-timeout=5"])
def test_what_vllms_server_has_no_use_for_is_refused(flag: str, tiny: Path) -> None:
    ran = command("serve", str(tiny), flag)
    assert ran.returncode == 1
    assert flag.partition("=")[0] in ran.stderr


def test_a_dry_run_shows_the_command_of_a_model_that_nobody_owns(tiny: Path) -> None:
    ran = command("serve", str(tiny), "--port", str(free_port()), "--max-model-len", "100", "--dry-run")
    assert ran.returncode == 0
    assert f"--model {tiny} --port" in ran.stderr
    assert ran.stderr.rstrip().endswith("--max-model-len 100")


def test_only_the_word_that_is_the_model_is_taken_out_of_the_command(tiny: Path) -> None:
    ran = command("serve", "--served-model-name", str(tiny), "--log-level", "debug", str(tiny), "--dry-run")
    assert ran.stderr.rstrip().endswith(f"--model {tiny} --served-model-name {tiny} --uvicorn-log-level debug")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vllm_omni", *words], capture_output=True, text=True, check=False, timeout=60)
