"""OpenAI's image API on a tiny Cosmos3 with random weights: a real server and the official client."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tiny_cosmos3
from PIL import Image

QUICK: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 2.0}
PATIENCE = 60.0


@dataclass
class Server:
    """A server process; `log` is what it wrote."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Where it serves, "" as long as it does not."""
        found = re.search(r"Ready in .* at (http://\S+)", self.log.read_text())
        return found[1] if found else ""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def make(self, *, size: Any = "64x64", **given: Any) -> Any:
        """The answer to a request for pictures; what OpenAI does not have goes into the body, as it does for a user of the client."""
        own = {name: given.pop(name) for name in ("n", "output_format", "response_format", "stream", "partial_images") if name in given}
        return self.client().images.generate(prompt="a red cube", size=size, extra_body={**QUICK, **given}, **own)

    def held(self) -> dict[str, float]:
        """What is kept for requests that is not zero."""
        lines = [line.rsplit(" ", 1) for line in httpx.get(f"{self.url}/metrics").text.splitlines() if not line.startswith("#")]
        kept = re.compile(r"vllm_omni_(requests_in_flight|process_(?!\w+_bytes).*)")
        return {name: float(value) for name, value in lines if kept.fullmatch(name) and float(value)}


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny_cosmos3.write(tmp_path_factory.mktemp("nano"), "nano")
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "vllm_omni", "serve", str(folder), "--host", "127.0.0.1", "--port", "0", "--served-model-name", "nano"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        running = Server(process, log)
        until(lambda: running.url or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _still_well(server: Server) -> Iterator[None]:
    """After every test the server keeps nothing, and the next ordinary request succeeds."""
    yield
    until(lambda: not server.held())
    assert server.make(num_inference_steps=1).data, server.log.read_text()


def pixels(b64: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))


def test_several_are_as_many_requests_with_seeds_that_count_up(server: Server) -> None:
    together = server.make(n=3, seed=5)
    assert [made.seed for made in together.data] == [5, 6, 7]
    alone = [server.make(seed=seed).data[0] for seed in (5, 6, 7)]
    for one, other in zip(together.data, alone, strict=True):
        assert (pixels(one.b64_json) == pixels(other.b64_json)).all()
    assert len({made.b64_json for made in together.data}) == 3


def test_the_seed_that_was_used_is_told(server: Server) -> None:
    first, second = server.make().data[0], server.make().data[0]
    assert first.seed != second.seed and first.b64_json != second.b64_json
    assert server.make(seed=first.seed).data[0].b64_json == first.b64_json


def test_the_size_is_the_one_asked_for(server: Server) -> None:
    for size in ("64x64", "96x48", "48x112"):
        answer = server.make(size=size)
        height, width, _ = pixels(answer.data[0].b64_json).shape
        assert answer.size == size == f"{width}x{height}"
    assert server.make(size="auto", num_inference_steps=1, guidance_scale=1.0).size == "1280x720"


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
def test_formats_and_links(server: Server, name: Any) -> None:
    answer = server.make(output_format=name, seed=1, n=2, response_format="url")
    assert len({made.url for made in answer.data}) == 2
    for made, inline in zip(answer.data, server.make(output_format=name, seed=1, n=2).data, strict=True):
        got = httpx.get(made.url)
        assert got.headers["content-type"] == f"image/{name}" and got.content == base64.b64decode(inline.b64_json)
        assert Image.open(io.BytesIO(got.content)).format == name.upper()


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_with_previews(server: Server, count: int) -> None:
    events = list(server.make(stream=True, partial_images=2, n=count, seed=3, num_inference_steps=6))
    whole = server.make(n=count, seed=3, num_inference_steps=6)
    for index, made in enumerate(whole.data):
        mine = [event for event in events if event.index == index]
        assert [event.type for event in mine] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
        assert [event.partial_image_index for event in mine[:-1]] == [0, 1]
        assert mine[-1].b64_json == made.b64_json and mine[-1].seed == made.seed == 3 + index
        assert len({event.b64_json for event in mine}) == 3
        assert all(event.size == "64x64" and pixels(event.b64_json).shape == (64, 64, 3) for event in mine)
    assert len(events) == 3 * count


def test_options_in_an_object_of_their_own(server: Server) -> None:
    """As Cosmos3's clients send them."""
    with_words, without = (server.make(seed=1, extra_args={"use_resolution_template": told}).data[0] for told in (True, False))
    assert with_words.b64_json == server.make(seed=1).data[0].b64_json != without.b64_json


def test_requests_beside_each_other(server: Server) -> None:
    """Of other sizes, lengths and guidance; each as if it were alone, but for the rounding of shared products."""
    wanted: list[dict[str, Any]] = [
        {"size": "64x64", "seed": 1}, {"size": "96x48", "seed": 2, "num_inference_steps": 5},
        {"size": "48x80", "seed": 3, "guidance_scale": 1.0},
    ]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(lambda given: server.make(**given), wanted))
    for given, answer in zip(wanted, together, strict=True):
        difference = pixels(answer.data[0].b64_json).astype(int) - pixels(server.make(**given).data[0].b64_json)
        assert answer.size == given["size"] and np.abs(difference).max() <= 1


def test_a_stream_that_is_left_frees_everything(server: Server) -> None:
    stream = server.make(stream=True, partial_images=3, num_inference_steps=1_000, n=2)
    assert next(iter(stream)).type == "image_generation.partial_image"
    assert server.held()["vllm_omni_requests_in_flight"] == 1
    stream.close()
    until(lambda: not server.held())


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"size": "large"}, "size"), ({"size": "65x64"}, "size"), ({"n": 0}, "n"), ({"n": "2"}, "n"), ({"seed": -1}, "seed"),
        ({"num_inference_steps": 0}, "num_inference_steps"), ({"stream": True, "partial_images": 4}, "partial_images"),
        ({"extra_params": {"guidance_scale": "high"}}, "extra_params.guidance_scale"), ({"extra_args": {"steps": 3}}, "extra_args.steps"),
        ({"num_frames": 9}, "num_frames"), ({"strength": 0.5}, "strength"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Server, given: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.make(**given)
    assert refused.value.param == field and field in refused.value.message


def test_an_edit_is_refused_by_the_model(server: Server) -> None:
    """Cosmos3 goes on from a picture with a video only."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    with pytest.raises(openai.BadRequestError, match="video"):
        server.client().images.edit(prompt="x", image=file.getvalue(), size="64x64")  # type: ignore[call-overload]
