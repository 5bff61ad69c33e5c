"""A real server process for the tests of the HTTP edge, and the clients that drive it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # tiny models are fastest so, here and in the servers
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs this in the background has it ignored, in all children, too
signal.signal(signal.SIGHUP, signal.SIG_DFL)
collect_ignore_glob = [] if find_spec("vllm") else ["test_ar_*"]  # ci/setup installs it

COMMAND = (sys.executable, "-m", "vllm_omni", "serve")
PATIENCE = 60.0
"""Seconds after which a server that should have done something never will."""


@dataclass
class Running:
    """A server process on a loopback port; `log` is what it wrote."""

    process: subprocess.Popen[bytes]
    port: int
    log_file: Path
    key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @cached_property
    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE)

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=PATIENCE)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=PATIENCE)

    def gauges(self) -> dict[str, float]:
        """Every line of /metrics."""
        lines = [line.rsplit(" ", 1) for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def in_flight(self) -> float:
        return self.gauges()["vllm_omni_requests_in_flight"]

    def held(self) -> dict[str, float]:
        """What is kept for requests, in whichever process, that is not zero."""
        kept = re.compile(r"vllm_omni_(requests_in_flight|process_(?!\w+_bytes).*)")
        return {name: value for name, value in self.gauges().items() if kept.fullmatch(name) and value}

    def signal(self, *numbers: signal.Signals) -> int:
        """Send signals, half a second apart, and return the exit code."""
        for number in numbers:
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        return self.process.wait(PATIENCE)

    def wait_ready(self) -> Running:
        until(lambda: self.process.poll() is not None or self._health() == 200)
        assert self.process.poll() is None, self.log
        return self

    def _health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def install(folder: Path, name: str, entry_points: str, **files: str) -> dict[str, str]:
    """A distribution of one package in `folder`, as if installed; `files` are its modules. The environment that has it."""
    info, package = folder / f"{name}-1.0.dist-info", folder / name
    info.mkdir(parents=True)
    package.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for file, text in ({"__init__": ""} | files).items():
        (package / (file if "." in file else f"{file}.py")).write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


Serve = Callable[..., contextlib.AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server: `with serve("echo", "--api-key", "k") as running`. It is not ready yet."""

    @contextlib.contextmanager
    def start(model: str, *arguments: str, key: str = "", env: Mapping[str, str] | None = None) -> Iterator[Running]:
        port = free_port()
        log_file = tmp_path_factory.mktemp("serve") / "log"
        command = [*COMMAND, model, "--host", "127.0.0.1", "--port", str(port), *arguments, *(["--api-key", key] if key else [])]
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, process_group=0)
        try:
            yield Running(process, port, log_file, key)
        finally:
            process.kill()
            process.wait()

    return start


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Running]:
    """One server for all tests that leave it as they found it."""
    with serve("echo") as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model, in float32."""
    import tiny_lm

    return tiny_lm.write(tmp_path_factory.mktemp("tiny"), dtype="float32")


@pytest.fixture(scope="session")
def stock(tiny: Path) -> dict[str, list[int]]:
    """What stock vLLM answers to each of `talk.PROMPTS`: 120 tokens, greedily."""
    import talk

    return talk.stock_answers(tiny, 120)


@pytest.fixture(scope="session")
def talking(serve: Serve, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of that model, on stock vLLM."""
    import talk

    env = install(tmp_path_factory.mktemp("talk"), "spoken", "[vllm_omni.aliases]\ntalk = talk:PLUGIN\n")
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(talk.__file__).parent)])
    with serve("talk", *talk.flags(model=str(tiny), **talk.SMALL), env=env) as running:
        yield running.wait_ready()


@pytest.fixture(autouse=True)
def _still_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server: it is alive, healthy, keeps nothing, and the next ordinary request succeeds."""
    yield
    if "server" in request.fixturenames:
        running: Running = request.getfixturevalue("server")
        until(lambda: not running.held())
        assert running.process.poll() is None, running.log
        assert running.openai.chat.completions.create(model="echo", messages=[{"role": "user", "content": "still well"}]).choices
