"""Stages on vLLM beside what they are made of, in turn, in one run: vLLM's own server, and a bare script that loads the same model.

8 clients stream chats of text from a tiny model and from SmolLM2; and how long it takes from the command to the first answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
import tiny_lm
import uvloop

CLIENTS = 8
ROUNDS = 3
TOKENS = {"tiny": 300, "smollm2": 24}
ENV = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
ENGINE = {
    "enforce-eager": True, "max-model-len": 1024, "kv-cache-memory-bytes": 256 << 20, "max-num-seqs": 16,
    "max-num-batched-tokens": 2048, "dtype": "bfloat16",
}  # fmt: skip
BARE = """
import os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM, SamplingParams
engine = dict(max_model_len=2048, kv_cache_memory_bytes=256 << 20, max_num_seqs=16, max_num_batched_tokens=2048)
llm = LLM(sys.argv[1], enforce_eager=True, **engine)
llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from vllm_omni_speaking_llm.weights import thinker_folder

    return {"tiny": str(tiny_lm.write(tmp_path_factory.mktemp("tiny"))), "smollm2": thinker_folder()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, env: dict[str, str]) -> Iterator[psutil.Process]:
    """A server until it is no longer needed, from when it is healthy."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        wait(port, process)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def wait(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            assert process is None or process.poll() is None
            time.sleep(0.02)


def engine_flags() -> list[str]:
    return [word for name, value in ENGINE.items() for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]


def tokens_a_second(port: int, tokens: int) -> float:
    """Over all clients, each with a connection of its own."""

    async def one(number: int) -> int:
        body = {
            "model": "it", "messages": [{"role": "user", "content": f"Tell me a story about the number {number}."}], "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
        answer = await reader.read()
        writer.close()
        assert b" 200 " in answer[:20], answer
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        assert len([event for event in events if event["choices"]]) > 5, "it streams"
        return int(events[-1]["usage"]["completion_tokens"])

    async def main() -> float:
        began = time.monotonic()
        counts = await asyncio.gather(*map(one, range(CLIENTS)))
        assert set(counts) == {tokens}
        return sum(counts) / (time.monotonic() - began)

    return uvloop.run(main())


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_a_second_beside_vllms_own_server(name: str, models: dict[str, str], benchmark: Any) -> None:
    ports = {"ours": free_port(), "stock": free_port()}
    env = {**ENV, "OMP_NUM_THREADS": "1"} if name == "tiny" else ENV
    ours = [sys.executable, "-m", "vllm_omni", "serve", "speak", "--served-model-name", "it", "--host", "127.0.0.1", "--port"]
    stock = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", models[name], "--served-model-name", "it", "--port"]
    extra = ["--disable-log-stats", "--disable-uvicorn-access-log"]
    rates: dict[str, list[float]] = {which: [] for which in ports}
    with ExitStack() as stack:
        stack.enter_context(running([*stock, str(ports["stock"]), *extra, *engine_flags()], ports["stock"], env))
        stack.enter_context(running([*ours, str(ports["ours"]), "--model", models[name], *engine_flags()], ports["ours"], env))
        for number in range(ROUNDS + 1):
            for which, port in ports.items():
                rate = tokens_a_second(port, TOKENS[name])
                rates[which] += [rate] if number else []  # the first round warms up
        benchmark.pedantic(tokens_a_second, (ports["ours"], TOKENS[name]), rounds=1)
    median = {which: statistics.median(values) for which, values in rates.items()}
    ratio = median["ours"] / median["stock"]
    benchmark.extra_info.update({"tokens_per_s": median, "ratio": ratio})
    print(f"\n{name}, {CLIENTS} clients: ours {median['ours']:.0f} tokens/s, vLLM's server {median['stock']:.0f}, ratio {ratio:.2f}")


def test_time_to_the_first_answer_beside_a_bare_script(models: dict[str, str], benchmark: Any) -> None:
    def ours() -> None:
        port = free_port()
        command = [sys.executable, "-m", "vllm_omni", "serve", "speak", "--host", "127.0.0.1", "--port", str(port)]
        began = time.monotonic()
        with running(command, port, ENV) as server:
            seconds["ours"].append(time.monotonic() - began)
            thinker = next(child for child in server.children(recursive=True) if child.name() == "thinker.0")
            began = time.monotonic()
            thinker.kill()
            while status(port) == 200:
                time.sleep(0.005)
            wait(port)
            seconds["again"].append(time.monotonic() - began)

    def bare() -> None:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", BARE, models["smollm2"]], env=ENV, check=True, capture_output=True)
        seconds["bare"].append(time.monotonic() - began)

    seconds: dict[str, list[float]] = {"ours": [], "bare": [], "again": []}
    both: tuple[Callable[[], None], ...] = (bare, ours)
    for call in both:
        call()  # what is read from the disk once
    for values in seconds.values():
        values.clear()
    bare()
    benchmark.pedantic(ours, rounds=1)
    median = {which: statistics.median(values) for which, values in seconds.items()}
    ratio = median["ours"] / median["bare"]
    benchmark.extra_info.update({"seconds": median, "ratio": ratio})
    print(
        f"\nspeak is healthy after {median['ours']:.1f} s, a bare script has generated after {median['bare']:.1f} s, ratio {ratio:.2f}; "
        f"a stage on vLLM in the prepared process takes {median['again']:.1f} s"
    )


def status(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
