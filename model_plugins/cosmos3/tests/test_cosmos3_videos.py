"""OpenAI's video API on a tiny Cosmos3 with random weights: real servers, the official client, and the requests that people send."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
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

from vllm_omni.serving import image, video

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
PATIENCE = 60.0
QUICK = {"size": "64x64", "num_inference_steps": "2", "num_frames": "9", "guidance_scale": "2.0", "seed": "3"}
LONG = {**QUICK, "size": "256x256", "num_inference_steps": "1000", "num_frames": "97"}
CAPTION = json.dumps({"subjects": [{"description": "a robot arm over a table of red cubes, " * 40, "count": 1}], "style": "real"})
MOVED = np.arange(64, dtype=np.uint8)[None, :, None, None] * 3 + np.arange(17, dtype=np.uint8)[:, None, None, None]
FILM = np.ascontiguousarray(np.broadcast_to(MOVED, (17, 64, 64, 3)))
PICTURE = image.encode_png(FILM[0])


@dataclass
class Server:
    """A server process; `log` is what it wrote."""

    process: subprocess.Popen[bytes]
    log: Path
    store: Path

    @property
    def url(self) -> str:
        """Where it serves, "" as long as it does not."""
        found = re.search(r"Ready in .* at (http://\S+)", self.log.read_text())
        return found[1] if found else ""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}/v1/videos{path}", timeout=PATIENCE, **more)

    def post(self, path: str = "/sync", *, file: tuple[str, bytes, str] | None = None, **given: Any) -> httpx.Response:
        """A multipart form, every value a string."""
        fields: dict[str, Any] = {"prompt": "a red cube", **QUICK, **given}
        parts = {name: (None, value) for name, value in fields.items() if value is not None}
        return httpx.post(f"{self.url}/v1/videos{path}", files={**parts, **({"input_reference": file} if file else {})}, timeout=PATIENCE)

    def ended(self, name: str) -> dict[str, Any]:
        until(lambda: self.get(f"/{name}").json()["status"] not in ("queued", "in_progress"))
        return dict(self.get(f"/{name}").json())

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


@contextlib.contextmanager
def serving(folder: Path, store: Path, log: Path) -> Iterator[Server]:
    named = ["--served-model-name", "nano", "--store", str(store)]
    command = [sys.executable, "-m", "vllm_omni", "serve", str(folder), "--host", "127.0.0.1", "--port", "0", *named]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        running = Server(process, log, store)
        until(lambda: running.url or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cosmos3.write(tmp_path_factory.mktemp("nano"), "nano")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("serve") / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def _still_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the shared server keeps nothing for requests, and the next ordinary one succeeds."""
    yield
    if "server" in request.fixturenames:
        running: Server = request.getfixturevalue("server")
        until(lambda: not running.held())
        assert running.post().status_code == 200, running.log.read_text()


def frames(response: httpx.Response) -> video.Frames:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "video/mp4" and int(response.headers["content-length"]) == len(response.content)
    return video.decode(response.content, "answer")[0]


def refused(response: httpx.Response) -> tuple[str, str]:
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error", response.text
    return error["param"], error["message"]


# The official client.


def test_the_official_client(server: Server) -> None:
    videos = server.client().videos
    body = {"num_inference_steps": 2, "num_frames": 9, "seed": 3, "guidance_scale": 2.0}
    made = videos.create_and_poll(prompt="a red cube", model="nano", size="64x64", extra_body=body, poll_interval_ms=20)  # type: ignore[arg-type]
    assert (made.status, made.progress, made.object, made.model, made.size) == ("completed", 100, "video", "nano", "64x64")
    assert made.prompt == "a red cube" and made.error is None and made.remixed_from_video_id is None
    assert made.completed_at and made.expires_at == made.completed_at + 86_400 and made.created_at <= made.completed_at
    assert made.to_dict() | {"seed": 3, "fps": 24.0, "num_frames": 9, "seconds": "0.375"} == made.to_dict()
    content = videos.download_content(made.id).read()
    assert content == server.post().content
    assert videos.retrieve(made.id) == made and made in videos.list().data
    gone = videos.delete(made.id)
    assert gone.deleted and gone.id == made.id and gone.object == "video.deleted"
    for call in (videos.retrieve, videos.delete, videos.download_content):
        with pytest.raises(openai.NotFoundError, match=made.id):
            call(made.id)


def test_what_to_go_on_from_with_the_official_client(server: Server) -> None:
    """As bytes without a name, as a file with one, and as OpenAI's object."""
    uri = {"image_url": "data:image/png;base64," + base64.b64encode(PICTURE).decode()}
    body = {"num_inference_steps": 2, "num_frames": 9, "seed": 3, "guidance_scale": 2.0}
    videos = server.client().videos
    made = []
    for more in (
        {"input_reference": PICTURE},
        {"input_reference": ("first.png", PICTURE)},
        {"extra_body": {"input_reference": uri, **body}},
    ):
        given: dict[str, Any] = {"extra_body": body, **more}
        job = videos.create_and_poll(prompt="a red cube", size="64x64", poll_interval_ms=20, **given)  # type: ignore[arg-type]
        made.append(videos.download_content(job.id).read())
        videos.delete(job.id)
    assert made[0] == made[1] == made[2] != server.post().content


def test_pages_of_the_list(server: Server) -> None:
    names = [server.post("").json()["id"] for _ in range(3)]
    videos = server.client().videos
    assert [job.id for job in videos.list(limit=2)] == names[::-1]  # the client asks for the second page
    assert [job.id for job in videos.list(order="asc", after=names[0]).data] == names[1:]
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "none"}, "after")):
        assert refused(server.get("", params=query))[0] == param
    for name in names:
        assert server.ended(name)["status"] == "completed"
        assert videos.delete(name).deleted
    assert server.get("").json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


# What people send to a Cosmos3 server.


def test_words_to_a_video(server: Server) -> None:
    extra = json.dumps({"use_resolution_template": False, "use_duration_template": False, "guardrails": False})
    more = {"flow_shift": "10.0", "max_sequence_length": "4096", "fps": "24", "negative_prompt": CAPTION, "generate_sound": "false"}
    made = server.post(prompt=CAPTION, extra_params=extra, model="nano", **more)
    assert frames(made).shape == (9, 64, 64, 3)
    assert made.content == server.post(prompt=CAPTION, extra_params=extra, **more | {"generate_sound": "False"}).content
    for other in ({}, {"extra_params": extra, "flow_shift": "2.0"}, {"extra_params": extra, "max_sequence_length": "512"}):
        answer = server.post(prompt=CAPTION, **{**more, **other})
        assert frames(answer).shape == (9, 64, 64, 3) and answer.content != made.content  # each has an effect


def test_a_picture_to_a_video(server: Server) -> None:
    made = server.post(prompt=CAPTION, file=("first.png", PICTURE, "image/png"))
    assert frames(made).shape == (9, 64, 64, 3) and made.content != server.post(prompt=CAPTION).content


@pytest.mark.parametrize("kept", [{}, {"condition_frame_indexes_vision": [0], "condition_video_keep": "last"}])
def test_a_video_to_a_video(server: Server, kept: dict[str, Any]) -> None:
    encoder = video.Encoder("mp4")
    clip = video.whole(encoder.push(FILM, 24) + encoder.finish(), "mp4")
    made = server.post(file=("clip.mp4", clip, "video/mp4"), extra_params=json.dumps(kept))
    assert frames(made).shape == (9, 64, 64, 3)
    uri = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    numbers = {"num_frames": 9, "num_inference_steps": 2, "seed": 3, "guidance_scale": 2.0, "size": "64x64"}
    same = {"prompt": "a red cube", "input_reference": {"video_url": uri}, **numbers, **kept}
    assert httpx.post(f"{server.url}/v1/videos/sync", json=same, timeout=PATIENCE).content == made.content
    other = server.post(file=("clip.mp4", clip, "video/mp4"), extra_params=json.dumps({"condition_frame_indexes_vision": [1]}))
    assert frames(other).shape == (9, 64, 64, 3) and other.content != made.content


def test_a_job_as_a_form(server: Server) -> None:
    job = server.post("", prompt=CAPTION, seconds="1", num_frames=None, fps="8", output_format="webm", seed=None).json()
    assert job["status"] in ("queued", "in_progress") and job["progress"] < 100 and job["num_frames"] == 9 and job["prompt"] == CAPTION
    done = server.ended(job["id"])
    assert done["status"] == "completed" and done["seconds"] == "1" and done["fps"] == 8 and done["seed"] is not None
    content = server.get(f"/{job['id']}/content")
    assert content.headers["content-type"] == "video/webm"
    made, fps = video.decode(content.content, "answer")
    assert made.shape == (9, 64, 64, 3) and fps == 8
    again = server.post("", prompt=CAPTION, num_frames="9", fps="8", output_format="webm", seed=str(done["seed"])).json()
    assert server.ended(again["id"])["seed"] == done["seed"] and server.get(f"/{again['id']}/content").content == content.content
    part = server.get(f"/{job['id']}/content", headers={"Range": "bytes=4-99"})
    assert part.status_code == 206 and part.content == content.content[4:100]
    assert refused(server.get(f"/{job['id']}/content?variant=thumbnail"))[0] == "variant"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": "other"}, "model"),
        ({"n": "2"}, "n"),
        ({"num_frames": "many"}, "num_frames"),
        ({"num_frames": "5000"}, "num_frames"),
        ({"seconds": "4"}, "seconds"),
        ({"seconds": "500", "num_frames": None}, "seconds"),
        ({"seconds": "-1", "num_frames": None}, "seconds"),
        ({"seconds": "nan", "num_frames": None}, "seconds"),
        ({"output_format": "avi"}, "output_format"),
        ({"generate_sound": "true"}, "generate_sound"),
        ({"extra_params": '{"generate_sound": true}'}, "extra_params.generate_sound"),
        ({"extra_params": '{"action_mode": "policy", "domain_name": "x"}'}, "extra_params.action_mode"),
        ({"action_mode": "policy"}, "action_mode"),
        ({"extra_params": '{"guardrail": false}'}, "extra_params.guardrail"),
        ({"extra_params": "{"}, "extra_params"),
        ({"true_cfg_scale": "4"}, "true_cfg_scale"),
        ({"input_reference": "https://example.com/x.png"}, "input_reference.image_url"),
        ({"input_reference": "{}"}, "input_reference"),
        ({"input_reference": '{"file_id": "file-1"}'}, "input_reference.file_id"),
        ({"file": ("x.mp4", b"nothing", "video/mp4")}, "input_reference"),
        ({"file": ("x.png", b"nothing", "image/png")}, "input_reference"),
        ({"file": ("x", b"nothing", "")}, "input_reference"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Server, given: dict[str, Any], param: str) -> None:
    for path in ("", "/sync"):
        response = server.post(path, **given)
        if param == "model":
            assert response.status_code == 404 and response.json()["error"]["param"] == "model"
            continue
        named, said = refused(response)
        assert named == param and param.split(".")[-1].removesuffix("_url") in said
        assert "sound" not in param + str(given) or "not supported yet" in said
        assert "action" not in param or "not supported yet" in said
    assert not [job for job in server.get("").json()["data"] if job["status"] != "completed"]


def test_what_the_model_refuses_is_no_job(server: Server) -> None:
    assert refused(server.post(size="65x64"))[0] == "size"
    before = server.get("").json()["data"]
    wrong = server.post("", size="65x64")
    assert refused(wrong)[0] == "size" and "multiples of" in wrong.text
    assert server.get("").json()["data"] == before


# While it runs.


def test_two_at_once(server: Server) -> None:
    """Each is as if it were alone."""
    alone = [frames(server.post(seed=seed)) for seed in ("1", "2")]
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(lambda seed: frames(server.post(seed=seed)), ("1", "2")))
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).mean() < 2
    assert np.abs(alone[0].astype(int) - alone[1]).mean() > 5


def test_delete_while_it_runs(server: Server) -> None:
    name = server.post("", **LONG).json()["id"]
    until(lambda: server.get(f"/{name}").json()["progress"] > 0)
    job = server.get(f"/{name}").json()
    assert job["status"] == "in_progress" and job["progress"] < 100 and server.held()
    with ThreadPoolExecutor() as pool:
        content = pool.submit(lambda: server.get(f"/{name}/content"))  # it waits for the first bytes
        until(lambda: server.held()["vllm_omni_requests_in_flight"] == 2)
        assert httpx.delete(f"{server.url}/v1/videos/{name}", timeout=PATIENCE).json()["deleted"]
        assert content.result().status_code >= 400
    assert server.get(f"/{name}").status_code == 404
    until(lambda: not server.held())
    assert not list((server.store / "files").glob(f"{name}*"))


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        fields = {"prompt": "x", **LONG}
        httpx.post(f"{server.url}/v1/videos/sync", data=fields, timeout=httpx.Timeout(PATIENCE, read=1))
    until(lambda: not server.held())


def test_content_while_it_grows(server: Server) -> None:
    """The first bytes come before the end, and what came is the video."""
    name = server.post("", size="128x128", num_frames="481").json()["id"]
    with httpx.stream("GET", f"{server.url}/v1/videos/{name}/content", timeout=PATIENCE) as stream:
        pieces = stream.iter_raw()
        first = next(pieces)
        assert server.get(f"/{name}").json()["status"] == "in_progress"
        grown = b"".join([first, *pieces])
    assert server.ended(name)["num_frames"] == 481
    whole = server.get(f"/{name}/content").content
    assert b"moof" in grown and b"moof" not in whole
    assert np.array_equal(video.decode(grown, "grown")[0], video.decode(whole, "whole")[0])


def test_a_file_that_cannot_be_written_fails_its_job(server: Server) -> None:
    files = server.store / "files"
    files.rename(server.store / "away")
    try:
        job = server.ended(server.post("").json()["id"])
    finally:
        (server.store / "away").rename(files)
    assert job["status"] == "failed" and "cannot be stored" in job["error"]["message"]
    assert server.ended(server.post("").json()["id"])["status"] == "completed"


# Over a restart.


def test_jobs_outlive_their_server(folder: Path, tmp_path: Path) -> None:
    """The completed ones with their files; the others have failed, however the server ended."""
    store = tmp_path / "store"
    with serving(folder, store, tmp_path / "first") as first:
        done = first.ended(first.post("").json()["id"])
        content = first.get(f"/{done['id']}/content").content
        killed = first.post("", **LONG).json()["id"]
        until(lambda: first.get(f"/{killed}").json()["progress"] > 0)
        command = [sys.executable, "-m", "vllm_omni", "serve", str(folder), "--port", "0", "--store", str(store)]
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert second.returncode == 1 and str(store) in second.stderr.splitlines()[-1] and "--store" in second.stderr
        first.process.kill()
    with serving(folder, store, tmp_path / "second") as again:
        assert again.get(f"/{done['id']}").json() == done and again.get(f"/{done['id']}/content").content == content
        job = again.get(f"/{killed}").json()
        assert job["status"] == "failed" and "restarted" in job["error"]["message"]
        ended = again.post("", **LONG).json()["id"]
        until(lambda: again.get(f"/{ended}").json()["progress"] > 0)
        again.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{again.url}/health").status_code == 503)
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(PATIENCE) == 0 and "Traceback" not in again.log.read_text()
    with serving(folder, store, tmp_path / "third") as third:
        job = third.get(f"/{ended}").json()
        assert job["status"] == "failed" and "shutting down" in job["error"]["message"]
        assert [job["id"] for job in third.get("").json()["data"]] == [ended, killed, done["id"]]


# Without a server.


def test_generate(folder: Path, tmp_path: Path) -> None:
    """A film of each sample; from a film, too."""
    params = [part for name, value in QUICK.items() for part in ("--param", f"{name}={value}")]
    command = [sys.executable, "-m", "vllm_omni", "generate", str(folder), "a red cube", *params]
    first = subprocess.run([*command, "-o", tmp_path / "a.mp4", "--param", "n=2"], capture_output=True, text=True, check=False)
    assert first.returncode == 0 and first.stdout == "" and "9 frames of 64 x 64 pixels" in first.stderr, first.stderr
    one, two = (video.decode((tmp_path / name).read_bytes(), name)[0] for name in ("a.mp4", "a-2.mp4"))
    assert one.shape == two.shape == (9, 64, 64, 3) and not np.array_equal(one, two)
    more = ["--input", tmp_path / "a.mp4", "-o", tmp_path / "b.webm", "--param", "num_inference_steps=200"]
    second = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert second.returncode == 0 and "made 200 steps" in second.stderr, second.stderr
    assert video.decode((tmp_path / "b.webm").read_bytes(), "b")[0].shape == (9, 64, 64, 3)
    shutil.rmtree(tmp_path)
