"""The server as a process: its start and end, its doors, its errors, and what others may add to it."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import COMMAND, PATIENCE, Running, Serve, install, until

from vllm_omni import hookspecs

ODD = {
    "plugin": """
from vllm_omni.api import AUDIO, TEXT, ModelPlugin, OneShot, Stage, StageGraph
voice = Stage("voice", OneShot("odd.stages:Voice"), takes=(TEXT,), gives=(AUDIO,))
PLUGIN = ModelPlugin("odd", graphs=(StageGraph("odd", stages=(voice,), outputs={AUDIO: voice}),))
""",
    "stages": """
import os, time
import numpy as np
from vllm_omni.api import OneShotModule, audio
class Voice(OneShotModule):
    def run(self, rows):
        while not os.path.exists(os.environ["ODD_GATE"]):
            time.sleep(0.01)
        return [[] if "mute" in part.data else [audio(np.ones(2400, np.float32), 24000)] for _, part in rows]
""",
    "default.yaml": "graph: odd\nmachine: {device: cpu}\n",
}
"""A model that only speaks, says nothing when told to be mute, and takes its time until a file appears."""

ODD_ENTRY = "[vllm_omni.aliases]\nodd = odd.plugin:PLUGIN\n"

OUTSIDE = """
from fastapi import APIRouter
from vllm_omni.hookspecs import hookimpl
from vllm_omni.request import Request

@hookimpl
def vllm_omni_endpoints(server):
    router = APIRouter()

    @router.get("/outside/{word}")
    async def outside(word: str, times: int = 1):
        words = [payload.data async for payload in server.stream(Request.of(" ".join([word] * times)))]
        return {"model": server.deployment.served_name, "said": "".join(words)}

    return [router]
"""


def children(process: subprocess.Popen[bytes]) -> list[Path]:
    """The entries in /proc of a process' descendants."""
    found: list[str] = []
    waiting = [str(process.pid)]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            below = task.read_text().split()
            found += below
            waiting += below
    return [Path("/proc") / pid for pid in found]


def stream(running: Running, **body: Any) -> socket.socket:
    """An open stream whose first bytes have come."""
    raw = json.dumps({"messages": [{"role": "user", "content": "word " * 300}], "stream": True, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", running.port), PATIENCE)
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def health(running: Running) -> str:
    try:
        return running.http.get("/health").text
    except httpx.TransportError:
        return ""


def rest(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


@pytest.fixture(scope="module")
def odd(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("odd")
    env = install(folder, "odd", ODD_ENTRY, **ODD) | {"ODD_GATE": str(folder / "gate")}
    with serve("odd", "--served-model-name", "team/odd", env=env) as running:
        yield running, folder / "gate"


# Start.


def test_ready_only_after_a_warm_up_request(odd: tuple[Running, Path]) -> None:
    """F113: the process is up, the stages are, and still it says 503 and why until a request went through."""
    running, gate = odd
    until(lambda: "warming up" in health(running))
    assert running.gauges()["vllm_omni_requests_in_flight"] == 0
    for path in ("/health", "/v1/chat/completions", "/v1/audio/speech"):
        body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"input": "x"}
        response = running.http.get(path) if path == "/health" else running.http.post(path, json=body)
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json()["error"]["code"] == "service_unavailable"
    assert "Ready" not in running.log
    gate.touch()
    running.wait_ready()
    assert running.http.post("/v1/audio/speech", json={"input": "x", "response_format": "pcm"}).content == b"\xff\x7f" * 2400


def test_a_model_without_text_is_listed_and_healthy(odd: tuple[Running, Path]) -> None:
    """F091."""
    running, gate = odd
    gate.touch()
    running.wait_ready()
    assert [model.id for model in running.openai.models.list()] == ["team/odd"]
    assert running.openai.models.retrieve("team/odd").object == "model"
    with pytest.raises(openai.NotFoundError, match="team/odd"):
        running.openai.models.retrieve("odd")
    answer = running.openai.chat.completions.create(model="team/odd", messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.audio.data and answer.choices[0].message.audio.transcript == ""


def test_a_stage_that_gives_nothing_is_named(odd: tuple[Running, Path]) -> None:
    """F077: 5xx, never an empty success; also in a stream, where it is a status as long as nothing was sent."""
    running, gate = odd
    gate.touch()
    running.wait_ready()
    for streamed in (False, True):
        for name in ("wav", "pcm", "mp3", "opus"):
            response = running.http.post("/v1/audio/speech", json={"input": "mute", "response_format": name, "stream": streamed})
            assert response.status_code == 500 and "'voice'" in response.json()["error"]["message"]
    response = running.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "mute"}]})
    assert response.status_code == 500 and "'voice'" in response.json()["error"]["message"]


def test_a_normal_start_says_little(server: Running) -> None:
    lines = server.log.splitlines()
    assert len([line for line in lines[:25] if "Ready in" in line]) == 1
    assert lines[0].startswith("INFO ") and "echo" in lines[0]
    assert f"http://127.0.0.1:{server.port}" in server.log


def test_the_log_level_is_used(serve: Serve) -> None:
    with serve("echo", "--log-level", "error") as running:
        running.wait_ready()
        assert running.signal(signal.SIGINT) == 0
        assert running.log == ""


def test_an_occupied_port_is_one_sentence(server: Running) -> None:
    run = subprocess.run([*COMMAND, "echo", "--port", str(server.port), "--host", "127.0.0.1"], capture_output=True, text=True)
    assert run.returncode == 1
    [line] = run.stderr.splitlines()
    assert f"Port {server.port} of 127.0.0.1 is in use" in line and "--port" in line


@pytest.mark.parametrize(("flag", "value", "says"), [("--port", "70000", "65535"), ("--host", "no.such.host.invalid", "not known")])
def test_an_impossible_address_is_one_sentence(flag: str, value: str, says: str) -> None:
    run = subprocess.run([*COMMAND, "echo", "--port", "0", flag, value], capture_output=True, text=True)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and says in run.stderr


def test_a_store_for_a_model_that_keeps_nothing(tmp_path: Path) -> None:
    run = subprocess.run([*COMMAND, "echo", "--port", "0", "--store", str(tmp_path / "store")], capture_output=True, text=True)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and "--store has no effect" in run.stderr
    assert not (tmp_path / "store").exists()


# End.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly(serve: Serve, number: signal.Signals) -> None:
    """F115: code 0, no trace, nothing left running; an idle connection is no reason to wait."""
    with serve("echo") as running:
        running.wait_ready()
        below = children(running.process)
        assert len(below) >= 4
        assert running.signal(number) == 0
        until(lambda: not any(path.exists() for path in below))
        assert "Traceback" not in running.log and len(running.log.splitlines()) < 25
        assert "Stopped" in running.log.splitlines()[-1]


def test_a_signal_while_starting(serve: Serve, tmp_path: Path) -> None:
    """F115: at every moment of the start, the warm-up included."""
    env = install(tmp_path, "odd", ODD_ENTRY, **ODD) | {"ODD_GATE": str(tmp_path / "gate")}
    for moment in ("just begun", "warming up"):
        with serve("odd", env=env) as running:
            until(lambda: "vllm-omni 0" in running.log if moment == "just begun" else moment in health(running))  # noqa: B023
            (tmp_path / "gate").touch()
            assert running.signal(signal.SIGTERM) == 0
            assert "Traceback" not in running.log, running.log


def test_a_stage_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    broken = ODD | {"stages": "raise RuntimeError('no such thing')"}
    env = install(tmp_path, "odd", ODD_ENTRY, **broken)
    run = subprocess.run([*COMMAND, "odd", "--port", "0"], capture_output=True, text=True, env={**os.environ, **env})
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("vllm-omni: error:") and "RuntimeError: no such thing" in run.stderr


def test_an_open_stream_may_end(serve: Serve) -> None:
    with serve("echo") as running:
        running.wait_ready()
        connection = stream(running, delay_ms=20.0, max_tokens=40)
        running.process.send_signal(signal.SIGTERM)
        answer = rest(connection)
        assert b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer
        assert running.process.wait(PATIENCE) == 0
        assert "Traceback" not in running.log


def test_a_second_signal_cuts_what_is_open(serve: Serve) -> None:
    """The client is told, a new one is refused, and nothing is left running."""
    with serve("echo") as running:
        running.wait_ready()
        below = children(running.process)
        connection = stream(running, delay_ms=1_000.0)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.http.get("/health").status_code == 503)
        assert "shutting down" in running.http.get("/health").text
        running.process.send_signal(signal.SIGTERM)
        answer = rest(connection)
        assert b"shutting down" in answer and b'"finish_reason":"' not in answer and b"[DONE]" not in answer
        assert running.process.wait(PATIENCE) == 0
        until(lambda: not any(path.exists() for path in below))
        assert "Traceback" not in running.log


# Doors.


def test_every_route_but_health_needs_the_key(serve: Serve) -> None:
    """F158: the documented list of open paths is `/health`; nothing is computed or listed without a key."""
    with serve("echo", "--api-key", "other", key="secret") as running:
        running.wait_ready()
        paths = running.http.get("/openapi.json").json()["paths"]
        assert {"/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/audio/speech"} <= set(paths)
        doors = [(method, path) for path, methods in paths.items() for method in methods]
        for method, path in [*doors, ("get", "/docs"), ("get", "/openapi.json"), ("get", "/nowhere"), ("delete", "/v1/models")]:
            for header in (None, "Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer secretsecret", "Bearer säcret"):
                headers = {} if header is None else {"Authorization": header.encode()}
                response = httpx.request(method, running.url + path, headers=headers)
                assert response.status_code == (200 if path == "/health" else 401), (method, path, header)
                if path != "/health":
                    assert response.json()["error"]["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
        for key in ("secret", "other"):
            assert httpx.get(running.url + "/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            running.openai.with_options(api_key="wrong").models.list()
        assert running.openai.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}]).choices
        assert "secret" not in running.log


def test_every_advertised_route_answers(server: Running) -> None:
    """In the documented shape, and never with a 500."""
    for path, methods in server.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            response = server.http.request(method, path.replace("{name}", "echo"), content=b"{}" if method == "post" else None)
            assert response.status_code == (400 if method == "post" else 200), (method, path)


def test_the_documentation_shows_the_models_parameters(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    fields = paths["/v1/audio/speech"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"input", "voice", "speed", "sample_rate"} <= set(fields)
    assert fields["speed"]["maximum"] == 4


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of a response in OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = body["error"]
    return found


def test_what_does_not_exist_has_the_shape_of_every_error(server: Running) -> None:
    missing = server.http.get("/v1/nothing")
    assert missing.status_code == 404 and "GET /v1/nothing" in error(missing)["message"]
    wrong = server.http.get("/v1/chat/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and "POST" in error(wrong)["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a": 1} x'],
)
def test_a_body_that_is_no_json_object(server: Running, raw: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/audio/speech"):
        response = server.http.post(path, content=raw)
        assert response.status_code == 400 and error(response)["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(server: Running) -> None:
    """Told by its header at once, or noticed on the way."""
    whole = server.http.post("/v1/chat/completions", content=b" " * ((64 << 20) + 1))
    pieces = server.http.post("/v1/chat/completions", content=(b" " * (1 << 20) for _ in range(65)))
    for response in (whole, pieces):
        assert response.status_code == 413 and "64 MiB" in error(response)["message"]


def test_the_request_id_comes_back(server: Running) -> None:
    for path in ("/v1/models", "/v1/nothing"):
        assert server.http.get(path, headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert "x-request-id" not in server.http.get(path).headers
    refused = server.http.get("/v1/models", headers={"X-Request-Id": "a b"})
    assert refused.status_code == 400 and error(refused)["param"] == "X-Request-Id"


def test_metrics_count(server: Running) -> None:
    def count(status: int) -> float:
        return server.gauges().get(f'vllm_omni_requests_total{{endpoint="/v1/chat/completions",status="{status}"}}', 0)

    good, bad = count(200), count(400)
    server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True})
    server.http.post("/v1/chat/completions", json={})
    assert (count(200), count(400)) == (good + 1, bad + 1)
    gauges = server.gauges()
    assert gauges['vllm_omni_time_to_first_chunk_seconds_count{endpoint="/v1/chat/completions"}'] >= 1
    assert gauges['vllm_omni_process_rss_bytes{process="speaker.0"}'] > 1e6
    server.http.get("/never/seen/before")
    assert not any("/never" in name for name in server.gauges())


# Hooks.


def test_an_outside_endpoint_is_served(serve: Serve, tmp_path: Path) -> None:
    """With the key, the size limit and the error shape that all endpoints have."""
    env = install(tmp_path, "outside", "[vllm_omni.hooks]\noutside = outside.endpoints\n", endpoints=OUTSIDE)
    with serve("echo", key="k", env=env) as running:
        running.wait_ready()
        assert running.http.get("/outside/hey", params={"times": 2}).json() == {"model": "echo", "said": "hey hey"}
        assert httpx.get(running.url + "/outside/hey").status_code == 401
        assert error(running.http.get("/outside/hey", params={"times": "x"}))["param"] == "times"
        assert running.gauges()['vllm_omni_requests_total{endpoint="/outside/{word}",status="200"}'] == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("from vllm_omni.hookspecs import hookimpl\n@hookimpl\ndef vllm_omni_endpoint(server): ...", "unknown hook 'vllm_omni_endpoint'"),
        ("from vllm_omni.hookspecs import hookimpl\n@hookimpl\ndef vllm_omni_endpoints(severs): ...", "severs"),
        ("from vllm_omni.hookspecs import hookimpl\n@hookimpl\ndef vllm_omni_endpoints(server): return ['x']", "no APIRouter"),
        (OUTSIDE.replace("/outside/{word}", "/v1/models"), "GET /v1/models is served by both"),
    ],
)
def test_a_broken_hook_is_named_and_not_skipped(tmp_path: Path, code: str, says: str) -> None:
    env = install(tmp_path, "outside", "[vllm_omni.hooks]\noutside = outside.endpoints\n", endpoints=code)
    run = subprocess.run([*COMMAND, "echo", "--port", "0"], capture_output=True, text=True, env={**os.environ, **env})
    assert run.returncode == 1
    assert says in run.stderr and "outside 1.0" in run.stderr and "Traceback" not in run.stderr


def test_every_hook_is_documented() -> None:
    hooks = [function for name, function in vars(hookspecs).items() if hasattr(function, "vllm_omni_spec")]
    assert hookspecs.vllm_omni_endpoints in hooks
    for hook in hooks:
        text = inspect.getdoc(hook) or ""
        assert len(text) > 100 and "Returns" in text, hook
        signature = inspect.signature(hook)
        assert signature.return_annotation is not signature.empty
        for name, parameter in signature.parameters.items():
            assert parameter.annotation is not parameter.empty and re.search(rf"`{name}`", text), (hook, name)


def test_a_request_that_takes_too_long_is_aborted(serve: Serve) -> None:
    """F104: a time limit of the server's; the answer says so, and nothing of the request is kept."""
    with serve("echo", "--request-timeout", "0.3") as running:
        running.wait_ready()
        body = {"messages": [{"role": "user", "content": "la " * 100}], "delay_ms": 20}
        answer = running.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        until(lambda: not running.held())
        quick = running.http.post("/v1/chat/completions", json={"messages": body["messages"], "max_tokens": 2})
        assert quick.json()["choices"][0]["message"]["content"] == "la la"
