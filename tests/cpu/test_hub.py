"""Checkpoints from a hub: a small real one on this machine, asked by the real client in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import command, distribution, vllm_omni

from vllm_omni.hub import needed

CHUNK = 10 << 20
"""Bytes that the client writes at once."""
WEIGHTS = {"model.safetensors": b"w" * 1000}
FILES = {
    "config.json": b'{"model_type": "one", "needs": "text_only"}', "tokenizer.json": b"{}", "merges.txt": b"a b", "README.md": b"hi",
    "spiece.model": b"s", **WEIGHTS, "pytorch_model.bin": b"b" * 1000, "model.onnx": b"o", "original/model.safetensors": b"o",
    "original/params.json": b"{}", "picture.png": b"p",
}  # fmt: skip


class Hub:
    """Repositories by name and revision, and what was asked of them: method, path, Range and Authorization.

    As on the real hub, weights come from another host, which must not see the token.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {"org/tiny": {"main": FILES}}
        self.gated: dict[str, str] = {}
        self.large: dict[str, bytes] = {}
        self.stall_after: int | None = None
        self.silent = False
        self.stalled = threading.Event()
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def fetched(self) -> list[str]:
        """The files whose content was sent."""
        sent = (path.split("/resolve/")[1] for method, path, *_ in self.asked if method == "GET" and "/resolve/" in path)
        return sorted(path.partition("/")[2] for path in sent)


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, token = self.path.partition("?")[0], self.headers.get("Authorization")
        self.hub.asked.append((self.command, path, self.headers.get("Range"), token))
        if self.hub.silent:
            self.hub.stalled.wait(60)
            return
        if path.startswith("/cdn/"):
            self.reply(self.hub.large[path.removeprefix("/cdn/")])
            return
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        revisions = self.hub.repos.get(repo, {})
        asked = "".join(parts[5:6] if api else parts[3:4])
        name = next((name for name in revisions if asked in (name, commit(name))), None)
        files, file = revisions.get(name or "", {}), "/".join(parts[4:])
        if not revisions:
            self.refuse(401, "RepoNotFound")
        elif repo in self.hub.gated and token != f"Bearer {self.hub.gated[repo]}" and not api:
            self.refuse(403, "GatedRepo")
        elif name is None:
            self.refuse(404, "RevisionNotFound")
        elif api and parts[4] == "revision":
            self.reply_json({"id": repo, "sha": commit(name), "siblings": [{"rfilename": file} for file in files]})
        elif api:
            self.reply_json([{"type": "file", "path": file, "size": len(data), "oid": etag(data)} for file, data in files.items()])
        elif file not in files:
            self.refuse(404, "EntryNotFound", commit(name))
        elif file.endswith(".safetensors"):
            data = files[file]
            self.hub.large[etag(data)] = data
            linked = {"X-Linked-Etag": f'"{etag(data)}"', "X-Linked-Size": str(len(data))}
            elsewhere = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{etag(data)}"
            self.reply(b"", {"X-Repo-Commit": commit(name), "Location": elsewhere, **linked}, 302)
        else:
            self.reply(files[file], {"X-Repo-Commit": commit(name), "ETag": f'"{etag(files[file])}"'})

    def reply_json(self, body: object) -> None:
        self.reply(json.dumps(body).encode())

    def refuse(self, status: int, code: str, at: str | None = None) -> None:
        self.reply(b"", {"X-Error-Code": code, "X-Error-Message": code, **({"X-Repo-Commit": at} if at else {})}, status)

    def reply(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        if (asked := self.headers.get("Range")) and self.command == "GET" and status == 200:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers = {**(headers or {}), "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            data, status = data[start:], 206
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stall = self.hub.stall_after
        if stall is not None and len(data) > stall:
            self.wfile.write(data[:stall])
            self.wfile.flush()
            self.hub.stalled.wait(60)
            return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def commit(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.01,))
    thread.start()
    yield hub
    hub.stalled.set()
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "hf"
    names = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS")
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), **dict.fromkeys(names, "")}


CLIENT = """
import json, sys
from vllm_omni.errors import OmniError
from vllm_omni.hub import open_model
for model, revision, token in json.loads(sys.argv[1]):
    try:
        checkpoint = open_model(model, revision, token)
        if token:
            checkpoint["config.json"]
        print(checkpoint.fetch())
    except OmniError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
"""


def ask(model: str = "org/tiny", revision: str | None = None, token: str | None = None) -> list[str | None]:
    return [model, revision, token]


def answers(environ: dict[str, str], *asked: list[str | None]) -> list[str]:
    """For each question, in one process, the folder that was fetched or the error."""
    result = command("-c", CLIENT, json.dumps(asked), **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def fetch(environ: dict[str, str]) -> Path:
    (folder,) = answers(environ, ask())
    assert folder.startswith("/"), folder
    return Path(folder)


def test_what_is_needed() -> None:
    assert needed(FILES) == ["config.json", "tokenizer.json", "merges.txt", "spiece.model", "model.safetensors"]
    assert needed(["a/x.bin", "x.onnx", "config.json"]) == ["a/x.bin", "config.json"]
    assert needed(["x.onnx", "x.onnx_data", "y.gguf"]) == ["x.onnx", "x.onnx_data"]
    assert needed(["voices.txt", "x.py", ".gitattributes"]) == ["voices.txt"]


def test_only_needed_files_are_fetched_and_only_once(hub: Hub, environ: dict[str, str]) -> None:
    first, again = map(Path, answers(environ, ask(), ask()))
    assert first == again
    assert first.name == commit("main")
    names = {path.name for path in first.iterdir()}
    assert names == {"config.json", "tokenizer.json", "merges.txt", "spiece.model", "model.safetensors"}
    assert (first / "model.safetensors").read_bytes() == WEIGHTS["model.safetensors"]
    assert hub.fetched() == sorted(names)


def test_the_owner_is_found_before_weights_are_fetched(hub: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    distribution(tmp_path / "site", "tiny-one", models=["one"])
    lines = (["graph", "org/tiny"], ["serve", "org/tiny", "--dry-run"], ["serve", "org/tiny", "--set", "talker.replicas=0"])
    result = command("-c", f"from vllm_omni.cli.main import main\nfor line in {lines!r}: main(line)", path=tmp_path / "site", **environ)
    assert result.stdout.startswith("graph text_only:"), result.stderr
    assert "\ngraph: text_only " in result.stdout
    assert "'stages.talker.replicas' must be at least 1" in result.stderr
    assert hub.fetched() == ["config.json"]


def test_a_claim_sees_the_files_of_a_repository(hub: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    hub.repos["org/tiny"]["main"] = {"flow.json": b'{"a": 1}', "flow.pt": b"p"}
    claim = "def claims(files): return 'flow.pt' in files and files['flow.json'] == {'a': 1} and files['flow.pt'] is None\n"
    distribution(tmp_path / "site", "tiny-one", aliases=["uno"], claims={"uno": "tiny_one.claims:claims"}, files={"claims.py": claim})
    shown = vllm_omni("graph", "org/tiny", path=tmp_path / "site", **environ)
    assert shown.stdout.startswith("graph full:"), shown.stderr
    assert hub.fetched() == ["flow.json"]


def test_a_revision_is_honoured_and_kept_apart(hub: Hub, environ: dict[str, str]) -> None:
    hub.repos["org/tiny"]["v2"] = {**FILES, "model.safetensors": b"second"}
    folders = answers(environ, ask(revision="v2"), ask(revision=commit("v2")), ask())
    assert [(Path(folder) / "model.safetensors").read_bytes() for folder in folders] == [b"second", b"second", WEIGHTS["model.safetensors"]]


def test_a_gated_model_wants_a_token(hub: Hub, environ: dict[str, str]) -> None:
    hub.repos["org/other"] = {"main": FILES}
    hub.gated = {"org/tiny": "secret", "org/other": "secret"}
    without, wrong, right = answers(environ, ask(), ask(token="guess"), ask(token="secret"))
    remedy = f"'org/tiny' is gated: accept its terms at {hub.url}/org/tiny, then give a token with --hf-token or HF_TOKEN."
    assert [without, wrong] == [f"NotFoundError: {remedy}"] * 2
    assert Path(right).name == commit("main")
    seen = {asked for _, path, _, asked in hub.asked if path.startswith("/cdn/")}
    assert seen == {None}
    (by_environment,) = answers({**environ, "HF_TOKEN": "secret"}, ask("org/other"))
    assert Path(by_environment).name == commit("main")


def test_what_the_hub_lacks_is_named(hub: Hub, environ: dict[str, str]) -> None:
    missing, revision, odd = answers(environ, ask("org/typo"), ask(revision="v9"), ask("org/a--b"))
    assert missing.startswith(f"NotFoundError: {hub.url} has no model 'org/typo', or it is private")
    assert revision.startswith("NotFoundError: 'org/tiny' has no revision 'v9'")
    assert odd.startswith("NotFoundError: 'org/a--b' is no hub id")


def test_without_a_connection_the_cache_serves(hub: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    offline = {**environ, "HF_HUB_OFFLINE": "1"}
    folder = str(fetch(environ))
    hub.asked.clear()
    named, pinned, other, unknown = answers(offline, ask(), ask(revision=commit("main")), ask("org/other"), ask(revision="v9"))
    assert named == pinned == folder
    assert other.startswith("UnavailableError: 'org/other' is not in the cache, and HF_HUB_OFFLINE is set.")
    assert unknown.startswith("UnavailableError: 'org/tiny@v9' is not in the cache, and HF_HUB_OFFLINE is set.")
    distribution(tmp_path / "site", "tiny-one", models=["one"])
    shown = vllm_omni("graph", "org/tiny", path=tmp_path / "site", **offline)
    assert shown.stdout.startswith("graph text_only:"), shown.stderr
    assert hub.asked == []


def test_half_a_cache_is_not_taken_for_the_model(hub: Hub, environ: dict[str, str]) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    hub.repos["org/tiny"]["main"] = {**FILES, **shards, "model.safetensors.index.json": json.dumps(index).encode()}
    offline = {**environ, "HF_HUB_OFFLINE": "1"}
    command("-c", "from vllm_omni.hub import open_model; open_model('org/tiny')['config.json']", **environ)
    assert answers(offline, ask()) == [
        "UnavailableError: The cache has 'org/tiny' without its weights, and the hub cannot be reached. Connect to fetch the rest."
    ]
    (fetch(environ) / "model-2.safetensors").unlink()
    assert "without model-2.safetensors, and" in answers(offline, ask())[0]


def test_a_killed_download_goes_on_where_it_stopped(hub: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    big = os.urandom(1 << 20) * (CHUNK // (1 << 20) * 2 + 3)
    hub.repos["org/tiny"]["main"] = {**FILES, "model.safetensors": big}
    hub.stall_after = CHUNK + (1 << 20)
    partial = tmp_path / f"hf/hub/models--org--tiny/blobs/{etag(big)}.incomplete"
    client = subprocess.Popen([sys.executable, "-c", CLIENT, json.dumps([ask()])], env={**os.environ, **environ}, stdout=subprocess.DEVNULL)
    until(lambda: partial.exists() and partial.stat().st_size >= CHUNK)
    client.send_signal(signal.SIGKILL)
    client.wait()
    hub.stall_after = None
    hub.asked.clear()
    folder = fetch(environ)
    assert (folder / "model.safetensors").read_bytes() == big
    assert not partial.exists()
    ranges = [asked for method, path, asked, _ in hub.asked if method == "GET" and path.startswith("/cdn/")]
    assert ranges == [f"bytes={CHUNK}-"]


def test_a_damaged_partial_file_is_noticed(hub: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    blobs = tmp_path / "hf/hub/models--org--tiny/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag(WEIGHTS['model.safetensors'])}.incomplete").write_bytes(b"x" * 10)
    damaged, anew = answers(environ, ask(), ask())
    assert "what an earlier run had fetched of model.safetensors was damaged; run the command again" in damaged
    assert (Path(anew) / "model.safetensors").read_bytes() == WEIGHTS["model.safetensors"]


def test_an_interrupt_ends_a_command_quietly(hub: Hub, environ: dict[str, str]) -> None:
    hub.silent = True
    command = [sys.executable, "-m", "vllm_omni", "graph", "org/tiny"]
    client = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: hub.asked)
    client.send_signal(signal.SIGINT)
    output, _ = client.communicate()
    assert (client.returncode, output) == (130, b"")


def test_a_terminal_shows_the_progress_of_weights(hub: Hub, environ: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, json.dumps([ask()])], env={**os.environ, **environ}, stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # the client has closed its end
            break
    os.close(ours)
    assert client.wait() == 0
    assert b"model.safetensors: 100%" in shown


def until(condition: Callable[[], object]) -> None:
    """Wait for something to happen. Fails after half a minute."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")
