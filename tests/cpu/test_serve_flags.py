"""Flags that people start servers of diffusion models with, as they know them from elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx
import pytest
from conftest import COMMAND, PATIENCE, Running, Serve, install
from PIL import Image

DENOISER = """
from vllm_omni.api import IMAGE, TEXT, ModelPlugin, OneShot, Param, Stage, StageGraph
offload = Param("offload", str, "none", choices=("none", "layers"))
painter = Stage("painter", OneShot("nowhere:Painter"), takes=(TEXT,), gives=(IMAGE,), args=(offload,), main=True)
PLUGIN = ModelPlugin("painter", graphs=(StageGraph("full", outputs={IMAGE: painter}, stages=(painter,)),))
"""


def see(running: Running, url: str) -> httpx.Response:
    content = [{"type": "text", "text": "see this"}, {"type": "image_url", "image_url": {"url": url}}]
    return running.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})


def test_files_below_the_allowed_folder_can_be_named_and_no_others(serve: Serve, tmp_path: Path) -> None:
    allowed, other = tmp_path / "media", tmp_path / "other"
    for folder in (allowed / "in side", other):
        folder.mkdir(parents=True)
        Image.new("RGB", (5, 7), "red").save(folder / "a.png")
    (allowed / "link.png").symlink_to(other / "a.png")
    (allowed / "text.png").write_text("no picture")
    with serve("echo", "--allowed-local-media-path", str(allowed)) as running:
        running.wait_ready()
        said = see(running, f"file://{allowed}/in%20side/a.png")
        assert said.status_code == 200, said.text
        assert "7x5" in said.text or "5x7" in said.text
        for url in (
            f"file://{other}/a.png", f"file://{allowed}/link.png", f"file://{allowed}/../other/a.png", f"file://{allowed}/none.png",
            f"file://elsewhere{allowed}/in%20side/a.png", f"file://{allowed}", "file://%00", f"file://{allowed}/in%20side%2F..%2F..%2Fother/a.png",
        ):  # fmt: skip
            refused = see(running, url)
            assert refused.status_code == 400, url
            error = refused.json()["error"]
            assert "may read: they lie below its --allowed-local-media-path" in error["message"], url
            assert error["param"] == "messages[0].content[1].image_url.url"
            assert str(tmp_path) not in error["message"]
        broken = see(running, f"file://{allowed}/text.png")
        assert "is not a picture" in broken.json()["error"]["message"]


def test_without_a_folder_no_file_can_be_named(server: Running) -> None:
    refused = see(server, "file:///etc/hostname")
    assert refused.status_code == 400
    assert "started without --allowed-local-media-path" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--init-timeout", "0.05"], "The model was not ready within 0.05 s (--init-timeout): "),
        (["--allowed-local-media-path", "nowhere"], "--allowed-local-media-path: there is no folder nowhere."),
        (["--model-class-name", "echoo"], "There is no plugin 'echoo'. Did you mean 'echo'?"),
        (["--tensor-parallel-size", "2"], "There is no flag --tensor-parallel-size, and no stage of graph"),
        (["--ulysses-degree", "2"], "They run on one device each: leave it out, or say 1."),
        (["--enable-layerwise-offload"], "There is no flag --enable-layerwise-offload"),
    ],
)
def test_a_start_that_cannot_be_says_why(flags: list[str], says: str) -> None:
    done = subprocess.run([*COMMAND, "echo", "--port", "0", *flags], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_that_say_what_is_so_anyway_and_offloading(tmp_path: Path) -> None:
    site = install(tmp_path / "site", "painter", "[vllm_omni.models]\nPainter = painter.plugin:PLUGIN\n", plugin=DENOISER)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    ones = ["--tensor-parallel-size", "1", "--cfg-parallel-size=1", "--ulysses-degree", "1"]
    more = ["--model-class-name", "Painter", "--enable-layerwise-offload", "--dry-run"]
    command = [*COMMAND, str(tmp_path / "model"), *ones, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **site})
    assert done.returncode == 0, done.stderr
    assert "offload: layers" in done.stdout and "--enable-layerwise-offload" in done.stdout
