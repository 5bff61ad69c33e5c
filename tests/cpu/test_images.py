"""`/v1/images/generations` and `/v1/images/edits` on a real server: the official client, forms, links, events, and one that goes away."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from conftest import Running, Serve, install, until
from PIL import Image

from vllm_omni.errors import NotFoundError
from vllm_omni.serving import image
from vllm_omni.serving.files import Files

SAID = "one two three four five six seven eight"
SAYS_ONLY = """
from vllm_omni.api import TEXT, ModelPlugin, OneShot, OneShotModule, Stage, StageGraph
mouth = Stage("mouth", OneShot("says.plugin:Mouth"), takes=(TEXT,), gives=(TEXT,))
PLUGIN = ModelPlugin("says", graphs=(StageGraph("says", stages=(mouth,), outputs={TEXT: mouth}),))
class Mouth(OneShotModule):
    def run(self, rows):
        return [[part] for _, part in rows]
"""


def png(width: int = 30, height: int = 20, colour: str = "red", name: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, name)
    return file.getvalue()


def pixels(b64: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, message and field of an answer that is an error in OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    return response.status_code, body["error"]["message"], body["error"]["param"]


def generate(server: Running, **body: Any) -> httpx.Response:
    return server.http.post("/v1/images/generations", json={"prompt": SAID} | body)


def drawn(server: Running, text: str = SAID, **params: Any) -> Any:
    """What a chat draws."""
    body = {"messages": [{"role": "user", "content": text}], "modalities": ["image"], **params}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    return pixels(answer["choices"][0]["message"]["images"][0]["image_url"]["url"].partition(",")[2])


# What the official client gets.


def test_a_picture(server: Running) -> None:
    answer = server.openai.images.generate(model="echo", prompt=SAID)
    assert answer.created > 1e9 and answer.output_format == "png" and answer.background == "opaque"
    [made] = answer.data
    assert made.url is None
    shown = pixels(made.b64_json)
    assert answer.size == f"{shown.shape[1]}x{shown.shape[0]}"
    assert (shown == drawn(server)).all()


def test_a_parameter_of_the_model_has_an_effect(server: Running) -> None:
    other = server.openai.images.generate(model="echo", prompt=SAID, extra_body={"seed": 7}).data[0].b64_json
    assert (pixels(other) == drawn(server, seed=7)).all() and (pixels(other) != drawn(server)).any()
    for name in ("extra_params", "extra_args", "extra_body"):
        nested = generate(server, **{name: {"seed": 7}}).json()
        assert nested["data"][0]["b64_json"] == other
        form = server.http.post("/v1/images/generations", data={"prompt": SAID, name: '{"seed": 7}'}).json()
        assert form["data"][0]["b64_json"] == other


def test_fields_that_ask_for_nothing(server: Running) -> None:
    answer = server.openai.images.generate(
        model="echo", prompt=SAID, n=1, size="auto", quality="auto", style="vivid", background="opaque", moderation="low", user="me",
        output_format="png", output_compression=100, response_format="b64_json", stream=False, partial_images=0,
    )  # fmt: skip
    assert (pixels(answer.data[0].b64_json) == drawn(server)).all()


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
def test_formats_are_what_they_say(server: Running, name: Any) -> None:
    answer = server.openai.images.generate(model="echo", prompt=SAID, output_format=name)
    data = base64.b64decode(answer.data[0].b64_json)
    with Image.open(io.BytesIO(data)) as file:
        assert file.format == name.upper() and answer.output_format == name
        assert np.abs(np.asarray(file.convert("RGB")).astype(int) - drawn(server)).mean() <= (0 if name == "png" else 5)
    if name != "png":
        small = server.openai.images.generate(model="echo", prompt=SAID, output_format=name, output_compression=5)
        assert len(base64.b64decode(small.data[0].b64_json)) < len(data) / 2


def test_an_edit(server: Running) -> None:
    """Its picture colours the ground; several are mixed. A form and JSON are the same."""
    one = server.openai.images.edit(model="echo", image=("a.png", png()), prompt="draw")
    assert pixels(one.data[0].b64_json)[0, 0].tolist() == [255, 0, 0]
    two = server.openai.images.edit(model="echo", image=[png(), png(colour="blue", name="webp")], prompt="draw", extra_body={"seed": 3})
    assert pixels(two.data[0].b64_json)[0, 0].tolist() == [128, 0, 128]
    uris = [uri(png()), uri(png(colour="blue", name="webp"), "image/webp")]
    bodies: list[dict[str, Any]] = [{"image": uris}, {"images": uris}, {"images": [{"image_url": url} for url in uris]}]
    for body in bodies:
        answer = server.http.post("/v1/images/edits", json={"prompt": "draw", "seed": 3} | body)
        assert answer.json()["data"][0]["b64_json"] == two.data[0].b64_json


def test_a_link_opens_without_the_key(serve: Serve) -> None:
    with serve("echo", key="secret") as running:
        running.wait_ready()
        answer = running.openai.images.generate(model="echo", prompt=SAID, response_format="url", output_format="webp")
        url = answer.data[0].url
        assert answer.data[0].b64_json is None
        assert url.startswith(f"{running.url}/v1/images/files/") and url.endswith(".webp")
        got = httpx.get(url)
        assert got.status_code == 200 and got.headers["content-type"] == "image/webp"
        assert Image.open(io.BytesIO(got.content)).format == "WEBP"
        other = running.http.post(
            "/v1/images/generations", json={"prompt": "a", "response_format": "url"}, headers={"Host": "pictures.example:81"}
        )
        assert other.json()["data"][0]["url"].startswith("http://pictures.example:81/v1/images/files/")
        assert httpx.get(url[:-9]).status_code == 404
        for path in ("..%2f..%2fmodels", "../../models", "x/../../../models"):
            assert httpx.get(f"{running.url}/v1/images/files/{path}").status_code in (401, 404)
        [folder] = [path.parent for path in Path("/tmp").glob(f"vllm-omni-*/{url.rpartition('/')[2]}")]
        running.process.terminate()
        running.process.wait()
        assert not folder.exists()


def test_files_have_a_limit() -> None:
    files = Files(100)
    names = [files.keep(b"x" * 40, "png") for _ in range(3)]
    with pytest.raises(NotFoundError):
        files.read(names[0])
    assert files.read(names[1]) == files.read(names[2]) == b"x" * 40
    assert len(files.read(files.keep(b"y" * 200, "png"))) == 200
    with pytest.raises(NotFoundError):
        Files().read(names[2])


# Streams.


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("previews", [0, 1, 3])
def test_a_stream(server: Running, edit: bool, previews: int) -> None:
    given: dict[str, Any] = {"model": "echo", "prompt": SAID, "stream": True, "partial_images": previews, "output_format": "webp"}
    images = server.openai.images
    events = list(images.edit(image=png(colour="white"), **given) if edit else images.generate(**given))
    family = "image_edit" if edit else "image_generation"
    assert [event.type for event in events] == [f"{family}.partial_image"] * previews + [f"{family}.completed"]
    assert [event.partial_image_index for event in events[:-1]] == list(range(previews))
    shown = [pixels(event.b64_json) for event in events]
    whole = images.edit(image=png(colour="white"), model="echo", prompt=SAID) if edit else images.generate(model="echo", prompt=SAID)
    for event, picture in zip(events, shown, strict=True):
        assert event.output_format == "webp" and event.size == whole.size and event.created_at > 1e9 and event.quality == "auto"
        assert Image.open(io.BytesIO(base64.b64decode(event.b64_json))).format == "WEBP"
        assert event.size == f"{picture.shape[1]}x{picture.shape[0]}"
    ink = [(picture < 200).sum() for picture in shown]
    assert ink == sorted(set(ink)), "each preview shows more"
    assert events[-1].usage.total_tokens == 0


def test_events_as_they_are_on_the_wire(server: Running) -> None:
    lines = generate(server, stream=True, partial_images=1).text.split("\n\n")
    assert lines.pop() == "" and len(lines) == 2
    for text in lines:
        name, data = text.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_a_client_that_goes_away(server: Running) -> None:
    """The fixture looks that nothing is kept."""
    for stream in (True, False):
        raw = json.dumps({"prompt": SAID, "delay_ms": 60_000, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
            until(lambda: server.in_flight() == 1)
        until(lambda: not server.held())


def test_a_fault_in_mid_request_is_told(server: Running) -> None:
    for stream in (True, False):
        status, message, _ = refusal(generate(server, fail_at=2, stream=stream))
        assert status == 500 and "word 2" in message


def test_requests_beside_each_other(server: Running) -> None:
    texts = ["a", "a b c", SAID, SAID * 3]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda text: server.openai.images.generate(model="echo", prompt=text), texts))
    for text, answer in zip(texts, answers, strict=True):
        assert (pixels(answer.data[0].b64_json) == drawn(server, text)).all()


# What is refused.

WRONG: Sequence[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "string"), ({"prompt": " "}, "prompt", "empty"),
    ({"n": 2}, "n", "no parameter"), ({"n": "1"}, "n", "no parameter"),
    ({"size": "64x64"}, "size", "no parameter"), ({"quality": "high"}, "quality", '"auto"'), ({"style": "natural"}, "style", '"vivid"'),
    ({"background": "transparent"}, "background", '"opaque"'), ({"moderation": "none"}, "moderation", '"low"'),
    ({"user": 1}, "user", "str"),
    ({"output_format": "gif"}, "output_format", "webp"), ({"output_compression": 50}, "output_compression", "jpeg"),
    ({"output_compression": 101, "output_format": "jpeg"}, "output_compression", "100"),
    ({"response_format": "png"}, "response_format", "url"),
    ({"stream": "yes"}, "stream", "boolean"), ({"stream": True, "response_format": "url"}, "response_format", "stream"),
    ({"partial_images": 1}, "partial_images", "stream"), ({"partial_images": 4, "stream": True}, "partial_images", "at most 3"),
    ({"promt": "x"}, "promt", "prompt"), ({"mask": "x"}, "mask", "Unknown"), ({"image": "x"}, "image", "Unknown"),
    ({"voice": "sine"}, "voice", "no effect"), ({"model": "dall-e-3"}, "model", "'echo'"), ({"svg": {"model": "x"}}, "svg", "null"),
    ({"extra_params": {"sed": 1}}, "extra_params.sed", "'seed'"), ({"extra_params": {"seed": "x"}}, "extra_params.seed", "int"),
    ({"extra_params": {"seed": 1}, "seed": 1}, "extra_params.seed", "two names"), ({"extra_args": "x"}, "extra_args", "object"),
    ({"extra_args": {"seed": 1}, "extra_body": {"seed": 1}}, "extra_body.seed", "two names"),
    ({"extra_params": {"prompt": "x"}}, "extra_params.prompt", "Unknown"), ({"prompt": "x" * 20_000}, "prompt", "shorten"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "says"), WRONG, ids=[json.dumps(body)[:40] for body, *_ in WRONG])
def test_a_wrong_field_is_named(server: Running, body: dict[str, Any], field: str, says: str) -> None:
    status, message, param = refusal(generate(server, **body))
    assert status == (404 if field == "model" else 400) and says in message and param == field
    assert field in message or field in ("model", "prompt")


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"seed": "x"}, "seed", "int"), ({"seed": ["1", "2"]}, "seed", "2 times"), ({"stream": "maybe"}, "stream", "boolean"),
        ({"output_compression": "lots"}, "output_compression", "integer"), ({"n": "2"}, "n", "no parameter"),
        ({"mask": "x"}, "mask", "null"),
        ({"image": "x"}, "image", "data:"), ({"input_fidelity": "high"}, "input_fidelity", '"low"'),
        ({"prompt": ["a", "b"]}, "prompt", "array"),
        ({"extra_params": "{"}, "extra_params", "object"), ({"extra_params": '{"seed": "1"}'}, "extra_params.seed", "int"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_form_is_named(server: Running, fields: dict[str, Any], field: str, says: str) -> None:
    files = {} if "image" in fields else {"image": png()}
    status, message, param = refusal(server.http.post("/v1/images/edits", data={"prompt": "x"} | fields, files=files))
    assert status == 400 and says in message and field in message and param == field


def test_a_form_means_what_json_does(server: Running) -> None:
    same = {"prompt": SAID, "seed": "7", "n": "1", "size": "auto", "quality": "auto", "output_format": "jpeg", "output_compression": "40"}
    whole = generate(server, seed=7, output_format="jpeg", output_compression=40).json()["data"]
    for form in ({"data": same}, {"files": {name: (None, value) for name, value in same.items()}}):
        assert server.http.post("/v1/images/generations", **form).json()["data"] == whole
    streamed = server.http.post("/v1/images/generations", data=same | {"stream": "true", "partial_images": "2"})
    assert streamed.text.count("event: image_generation.partial_image\n") == 2


def test_pictures_that_are_none(server: Running) -> None:
    def edit(*files: tuple[str, Any], **body: Any) -> tuple[int, str, str | None]:
        return refusal(
            server.http.post(
                "/v1/images/edits", **({"data": {"prompt": "x"}, "files": files} if files else {"json": {"prompt": "x"} | body})
            )
        )

    assert edit()[2] == "image"
    for status, message, field in (
        edit(("image", b"no picture")), edit(("image", png()[:60])), edit(("image", b"")), edit(image="http://x/y.png"),
        edit(image="data:image/png;base64,!"), edit(image=7), edit(image=uri(b"nothing")), edit(*[("image", png())] * 17),
    ):  # fmt: skip
        assert (status, field) in ((400, "image"), (400, "image[0]")) and "'image" in message, message
    assert edit(("image[]", png()), ("image[]", b"no picture"))[2] == "image[1]"
    assert edit(images=[{"image_url": uri(png())}, {"image_url": "x"}])[2] == "images[1].image_url"
    assert edit(images=[{"file_id": "x"}])[2] == "images[0].file_id"
    assert edit(("prompt", png()), ("image", png()))[2] == "prompt"


def test_a_damaged_form(server: Running) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        status, message, _ = refusal(server.http.post("/v1/images/edits", content=b"garbage", headers={"Content-Type": kind}))
        assert status == 400 and "form" in message


def test_a_form_that_is_too_large(server: Running) -> None:
    """Noticed on the way, in the middle of a file."""
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    pieces = (head, *[b" " * (1 << 20)] * 65, b"\r\n--x--\r\n")
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    status, message, _ = refusal(server.http.post("/v1/images/edits", content=iter(pieces), headers=headers))
    assert status == 413 and "64 MiB" in message


def test_a_model_without_pictures_says_so(serve: Serve, tmp_path: Path) -> None:
    files = {"plugin": SAYS_ONLY, "default.yaml": "graph: says\nmachine: {device: cpu}\n"}
    with serve("says", env=install(tmp_path, "says", "[vllm_omni.aliases]\nsays = says.plugin:PLUGIN\n", **files)) as running:
        running.wait_ready()
        with pytest.raises(openai.BadRequestError, match="gives no pictures"):
            running.openai.images.generate(model="says", prompt="x")
        with pytest.raises(openai.BadRequestError, match="takes no pictures"):
            running.openai.images.edit(model="says", prompt="x", image=png())


@pytest.mark.parametrize("name", image.WRITABLE)
def test_what_is_written_can_be_read(name: str) -> None:
    smooth = np.stack([*np.meshgrid(np.arange(64) * 3, np.arange(48) * 4), np.full((48, 64), 90)], -1).astype(np.uint8)
    back = image.decode(image.encode(smooth, name), "x")
    assert back.shape == smooth.shape and np.abs(back.astype(int) - smooth).max() <= (0 if name == "png" else 12)


def test_json_that_curl_calls_a_form_is_json(server: Running) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    made = server.http.post("/v1/images/generations", content=b' {"prompt": "draw this"}', headers=headers)
    assert made.status_code == 200, made.text
    assert made.json()["data"][0]["b64_json"]
