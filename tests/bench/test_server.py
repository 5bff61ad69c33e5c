"""64 streaming clients on the echo server and on a bare FastAPI application, in turn, in one run.

Requests a second without pauses; and, with a pause before each word, how much later than the pause each chunk arrives.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

CLIENTS = 64
WORDS = 16
ROUNDS = 3
SERVERS = {
    "ours": [sys.executable, "-m", "vllm_omni", "serve", "echo", "--host", "127.0.0.1", "--port"],
    "bare": [sys.executable, str(Path(__file__).with_name("bare.py"))],
}


@contextmanager
def server(command: list[str]) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(20)


async def client(port: int, requests: int, delay_ms: float) -> list[float]:
    """A lean client on one connection: the seconds between chunks."""
    body = {"model": "echo", "stream": True, "messages": [{"role": "user", "content": "word " * WORDS}], "delay_ms": delay_ms}
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    gaps = []
    for _ in range(requests):
        writer.write(head.encode() + payload)
        data, last, words = b"", time.monotonic(), 0
        while not data.endswith(b"0\r\n\r\n"):
            piece = await reader.read(65536)
            assert piece, data
            now = time.monotonic()
            data += piece
            if b'"content":"' in piece:
                words += 1
                if words > 1:
                    gaps.append(now - last)
                last = now
        assert data.startswith(b"HTTP/1.1 200") and data.count(b'"content":"w') + data.count(b'"content":" w') == WORDS, data
    writer.close()
    return gaps


def load(port: int, requests: int, delay_ms: float = 0.0) -> tuple[float, list[float]]:
    """Requests a second over all clients, and all gaps."""

    async def main() -> tuple[float, list[float]]:
        began = time.monotonic()
        gaps = await asyncio.gather(*(client(port, requests, delay_ms) for _ in range(CLIENTS)))
        return CLIENTS * requests / (time.monotonic() - began), [gap for one in gaps for gap in one]

    return uvloop.run(main())


def test_requests_a_second(benchmark: Any) -> None:
    rates: dict[str, list[float]] = {name: [] for name in SERVERS}
    with server(SERVERS["ours"]) as ours, server(SERVERS["bare"]) as bare:
        ports = {"ours": ours, "bare": bare}
        for port in ports.values():
            load(port, 3)
        for _ in range(ROUNDS):
            for name, port in ports.items():
                rates[name].append(load(port, 15)[0])
        benchmark.pedantic(load, (ours, 15), rounds=1)
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratio = median["ours"] / median["bare"]
    benchmark.extra_info.update({"requests_per_s": median, "ratio": ratio})
    print(f"\n{CLIENTS} clients, {WORDS} chunks: ours {median['ours']:.0f} requests/s, bare {median['bare']:.0f}, ratio {ratio:.2f}")


@pytest.mark.parametrize("delay_ms", [25.0])
def test_added_latency(benchmark: Any, delay_ms: float) -> None:
    found = {}
    with server(SERVERS["ours"]) as ours, server(SERVERS["bare"]) as bare:
        for name, port in {"ours": ours, "bare": bare}.items():
            load(port, 1, delay_ms)
            late = sorted((gap * 1000 - delay_ms) for gap in load(port, 10, delay_ms)[1])
            found[name] = {"p50_ms": late[len(late) // 2], "p99_ms": late[int(len(late) * 0.99)]}
        benchmark.pedantic(load, (ours, 1, delay_ms), rounds=1)
    benchmark.extra_info.update(found)
    print(f"\n{CLIENTS} clients, a chunk each {delay_ms:.0f} ms: added {found}")
