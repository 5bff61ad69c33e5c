"""A server whose processes are killed, as its clients see it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from conftest import Running, Serve, until


def stages(running: Running) -> list[psutil.Process]:
    """The stage processes: the children of the forkserver."""
    (server,) = psutil.Process(running.process.pid).children()
    return server.children()


def ask(running: Running, said: str, **fields: Any) -> httpx.Response:
    body = {"model": "echo", "messages": [{"role": "user", "content": said}], **fields}
    return running.http.post("/v1/chat/completions", json=body)


def test_kill_a_stage_in_flight(serve: Serve) -> None:
    """F112: the open request ends with a clear 503 within two seconds, /health says 503, the stage returns, the next one succeeds."""
    with serve("echo") as running:
        running.wait_ready()
        took: list[float] = []
        answers: list[httpx.Response] = []

        def long_request() -> None:
            answers.append(ask(running, "la " * 500, delay_ms=20))
            took.append(time.monotonic() - killed)

        working = threading.Thread(target=long_request)
        killed = time.monotonic()
        working.start()
        until(lambda: running.in_flight() == 1)
        killed = time.monotonic()
        for process in stages(running):
            process.kill()
        until(lambda: running.http.get("/health").status_code == 503)
        refused = ask(running, "hello")
        working.join(10)
        assert took[0] < 2
        error = answers[0].json()["error"]
        assert answers[0].status_code == 503 and "killed by SIGKILL" in error["message"] and error["code"] == "service_unavailable"
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        running.wait_ready()
        assert ask(running, "hello again").json()["choices"][0]["message"]["content"] == "hello again"
        assert not running.held()


def test_kill_a_stage_in_mid_stream(serve: Serve) -> None:
    """The stream ends with an error event; OpenAI's client raises it."""
    with serve("echo") as running:
        running.wait_ready()
        messages: Any = [{"role": "user", "content": "la " * 500}]
        stream = running.openai.chat.completions.create(model="echo", messages=messages, stream=True, extra_body={"delay_ms": 20})
        next(stream)
        for process in stages(running):
            process.kill()
        with pytest.raises(openai.APIError, match="went down"):
            for chunk in stream:
                assert not chunk.choices[0].finish_reason


def test_kill_the_server(serve: Serve) -> None:
    """F116: SIGKILL; after two seconds no process of it runs, and nothing is left of its shared memory and sockets."""
    with serve("echo") as running:
        running.wait_ready()
        directories = {path for path in Path("/tmp").glob("vllm-omni-*") if any(path.glob(f"client.{running.process.pid}"))}
        assert len(directories) == 1
        family = psutil.Process(running.process.pid).children(recursive=True)
        assert len(family) == 5
        stream = running.http.stream("POST", "/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "la " * 500}], "stream": True, "delay_ms": 20, "modalities": ["text", "audio"],
        })  # fmt: skip
        with pytest.raises(httpx.RemoteProtocolError), stream as response:
            for _ in response.iter_bytes():
                os.killpg(running.process.pid, signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=2)[1]
        assert not any(path.exists() for path in directories)
