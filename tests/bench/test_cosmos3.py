"""A tiny Cosmos3 on the CPU, beside diffusers in this process with the same folder, in turn, in one run."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from test_ar import ENV, free_port, running

sys.path.append(str(Path(__file__).parents[2] / "model_plugins/cosmos3/tests"))
import tiny_cosmos3

ROUNDS = 5
CLIENTS = 8
PICTURE: dict[str, Any] = {"size": "64x64", "num_inference_steps": 20}
CLIP: dict[str, Any] = {"size": "64x96", "num_inference_steps": 20, "num_frames": 9}
BARE = (
    "import sys; from diffusers import Cosmos3OmniPipeline; Cosmos3OmniPipeline.from_pretrained(sys.argv[1], enable_safety_checker=False)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cosmos3.write(tmp_path_factory.mktemp("nano"), "nano")


def call(pipeline: Any, asked: dict[str, Any], seed: int) -> None:
    import torch

    width, height = map(int, asked["size"].split("x"))
    pipeline(
        f"a dog {seed}", height=height, width=width, num_frames=asked.get("num_frames", 1), generator=torch.Generator().manual_seed(seed),
        num_inference_steps=asked["num_inference_steps"], output_type="np",
    )  # fmt: skip


def test_one_request_and_eight_at_once(benchmark: Any, folder: Path) -> None:
    """Seconds of the processors for one request, and seconds of the clock for eight, which diffusers makes one after the other."""
    from vllm_omni.omni import AsyncOmni

    pipeline = tiny_cosmos3.load(folder)

    async def work() -> dict[str, dict[str, float]]:
        async with AsyncOmni(str(folder), inline=True) as omni:

            async def ours(asked: dict[str, Any], seed: int) -> None:
                await omni.generate(f"a dog {seed}", "video" if "num_frames" in asked else "image", **asked, seed=seed)

            async def theirs(asked: dict[str, Any], seed: int) -> None:
                call(pipeline, asked, seed)

            async def at_once(asked: dict[str, Any]) -> None:
                await asyncio.gather(*(ours(asked, seed) for seed in range(CLIENTS)))

            async def in_turn(asked: dict[str, Any]) -> None:
                for seed in range(CLIENTS):
                    call(pipeline, asked, seed)

            found = {}
            for name, asked in {"picture": PICTURE, "clip": CLIP}.items():
                cpu = {"ours": lambda: ours(asked, 1), "diffusers": lambda: theirs(asked, 1)}  # noqa: B023
                wall = {"ours": lambda: at_once(asked), "diffusers": lambda: in_turn(asked)}  # noqa: B023
                found[f"{name}, cpu of one"] = await medians(cpu, time.process_time)
                found[f"{name}, {CLIENTS} at once"] = await medians(wall, time.perf_counter)
            return found

    found = benchmark.pedantic(lambda: asyncio.run(work()), rounds=1)
    benchmark.extra_info.update(found)
    for what, each in found.items():
        print(f"\n{what}: ours {each['ours']:.3f} s, diffusers {each['diffusers']:.3f} s, ratio {each['diffusers'] / each['ours']:.2f}")


async def medians(sides: dict[str, Callable[[], Awaitable[None]]], clock: Callable[[], float]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            began = clock()
            await side()
            if number:  # the first one warms up
                taken[name].append(clock() - began)
    return {name: statistics.median(each) for name, each in taken.items()}


def test_until_ready_and_without_vllm(benchmark: Any, folder: Path) -> None:
    """From the command to the first 200 of /health, warm-up included, beside a script that only loads the folder with diffusers."""
    taken: dict[str, list[float]] = {"ours": [], "diffusers": []}
    for _ in range(3):
        port = free_port()
        command = [sys.executable, "-m", "vllm_omni", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        began = time.monotonic()
        with running(command, port, ENV) as server:
            taken["ours"].append(time.monotonic() - began)
            maps = [each.path for process in (server, *server.children(recursive=True)) for each in process.memory_maps()]
            assert any("/torch/" in path for path in maps) and not any("/vllm/" in path for path in maps)
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", BARE, str(folder)], check=True, env=ENV, stderr=subprocess.DEVNULL)
        taken["diffusers"].append(time.monotonic() - began)
    benchmark.pedantic(lambda: None, rounds=1)
    median = {name: statistics.median(each) for name, each in taken.items()}
    benchmark.extra_info.update(median)
    print(
        f"\nready: ours {median['ours']:.1f} s, a bare load {median['diffusers']:.1f} s, ratio {median['ours'] / median['diffusers']:.2f}"
    )
