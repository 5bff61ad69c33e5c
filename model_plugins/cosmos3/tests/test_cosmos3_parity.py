"""Latents and frames against diffusers' pipeline, alone and with others beside them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_cosmos3
import torch
from PIL import Image

from vllm_omni.api import IMAGE, VIDEO, Payload, RequestError, SettingError, image, text, video
from vllm_omni.engine import Job, StageContext
from vllm_omni.engines.denoise import DenoiseEngine
from vllm_omni.kit.offload import Streamed
from vllm_omni_cosmos3.autoencoder import Autoencoder
from vllm_omni_cosmos3.decoder import Decoder
from vllm_omni_cosmos3.packed import Replayed
from vllm_omni_cosmos3.plugin import LATENTS, denoiser


@pytest.fixture(scope="module", params=["nano", "edge"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cosmos3.write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return tiny_cosmos3.load(checkpoint)


PICTURE = (np.random.default_rng(0).random((48, 80, 3)) * 255).astype(np.uint8)
CLIP = (np.random.default_rng(1).random((9, 48, 80, 3)) * 255).astype(np.uint8)
DEFAULTS = {param.name: param.default for param in denoiser.params}
KINDS: dict[str, dict[str, Any]] = {
    "t2i": {"size": "64x64"},
    "t2i of odd size": {"size": "80x48", "guidance_scale": 1.0},
    "t2v": {"size": "64x96", "num_frames": 9},
    "t2v of odd size": {"size": "48x80", "num_frames": 13, "guidance_scale": 1.0, "fps": 12.0},
    "i2v": {"size": "64x64", "num_frames": 9, "given": image(PICTURE)},
    "i2v unguided": {"size": "80x48", "num_frames": 5, "given": image(PICTURE), "guidance_scale": 1.0},
    "v2v": {"size": "64x64", "num_frames": 13, "given": video(CLIP, 24.0)},
    "v2v of the end": {
        "size": "96x48", "num_frames": 17, "given": video(CLIP, 24.0), "condition_video_keep": "last",
        "condition_frame_indexes_vision": [0], "guidance_scale": 1.0,
    },
}  # fmt: skip


def theirs(reference: Any, kind: str, prompt: str = "a dog on a table", seed: int = 7, output: str = "latent", **more: Any) -> torch.Tensor:
    asked = {**DEFAULTS, "num_inference_steps": 4, **KINDS[kind], **more}
    width, height = map(int, asked["size"].split("x"))
    given = asked.get("given")
    condition: dict[str, Any] = {}
    if given is not None and given.kind.name == "image":
        condition = {"image": Image.fromarray(given.data)}
    elif given is not None:
        condition = {"video": [Image.fromarray(frame) for frame in given.data], "condition_video_keep": asked["condition_video_keep"]}
        condition["condition_frame_indexes_vision"] = asked["condition_frame_indexes_vision"] or [0, 1]
    made: torch.Tensor = reference(
        prompt, negative_prompt=asked["negative_prompt"], num_frames=asked["num_frames"] or 1, height=height, width=width, fps=asked["fps"],
        num_inference_steps=asked["num_inference_steps"], guidance_scale=asked["guidance_scale"],
        generator=torch.Generator().manual_seed(seed), output_type=output, **condition,
    ).video  # fmt: skip
    return made[0] if output == "latent" else made


def held(engine: DenoiseEngine) -> list[str]:
    return [name for name, count in engine.held().items() if count and not name.endswith("_bytes")]


def context(checkpoint: Path, **args: Any) -> StageContext:
    every = {"budget": 64, "dtype": "auto", "load_format": "auto", "guardrail": False, "offload": "none", **args}
    memory = "vllm_omni_cosmos3.sizes:denoiser"
    return StageContext("denoiser", "vllm_omni_cosmos3.denoiser:Denoiser", str(checkpoint), args=every, memory=memory)


class Stage:
    """The engine with the tiny checkpoint, in this process."""

    def __init__(self, checkpoint: Path, **args: Any) -> None:
        self.engine = DenoiseEngine(context(checkpoint, **args))

    async def __aenter__(self) -> Stage:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not held(self.engine)
        await self.engine.stop()

    async def make(self, kind: str, prompt: str = "a dog on a table", seed: int = 7, **more: Any) -> torch.Tensor:
        asked = {**DEFAULTS, "num_inference_steps": 4, **KINDS[kind], **more, "seed": seed}
        parts = [text(prompt), *([asked["given"]] if "given" in asked else [])]
        job = Job("job", asked, (LATENTS,), (VIDEO,) if asked["num_frames"] else (IMAGE,))
        made = [payload async for payload in self.engine.stream(job, stream(parts))]
        (latents,) = made
        assert latents.meta == {"fps": asked["fps"], "seed": seed, "index": 0}
        found: torch.Tensor = latents.data
        return found


async def stream(parts: Sequence[Payload]) -> AsyncIterator[Payload]:
    for part in parts:
        yield part


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_latents_are_those_of_diffusers(checkpoint: Path, reference: Any, kind: str) -> None:
    async def ours() -> torch.Tensor:
        async with Stage(checkpoint) as stage:
            return await stage.make(kind)

    expected = theirs(reference, kind)
    for what, more in {"prompt": {"prompt": "x" * 200}, "seed": {"seed": 8}, "guidance": {"guidance_scale": 12.0}}.items():
        assert distance(theirs(reference, kind, **more), expected) >= 0.05, f"the reference does not react to the {what}"
    assert distance(asyncio.run(ours()), expected) <= 1e-4


def test_many_at_once_are_each_as_if_alone(checkpoint: Path, reference: Any) -> None:
    """Six requests of four sizes and three numbers of steps, some without guidance, that come one after the other; one is aborted."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("t2v", {"num_inference_steps": 9}), ("t2i", {"num_inference_steps": 3}), ("t2i of odd size", {"num_inference_steps": 6}),
        ("t2i", {"num_inference_steps": 9, "prompt": "hello"}), ("i2v", {"num_inference_steps": 6}), ("t2v of odd size", {}),
    ]  # fmt: skip

    async def ours() -> list[torch.Tensor | BaseException]:
        async with Stage(checkpoint, budget=512) as stage:
            seen: set[int] = set()
            whole = stage.engine._start
            stage.engine._start = lambda rows: (seen.add(len(rows)), whole(rows))[1]  # type: ignore[method-assign,func-returns-value]

            async def one(number: int) -> torch.Tensor:
                await asyncio.sleep(0.004 * number)
                kind, more = asked[number]
                return await stage.make(kind, seed=number, **more)

            tasks = [asyncio.create_task(one(number)) for number in range(len(asked))]
            await asyncio.sleep(0.03)
            tasks[4].cancel()
            made = await asyncio.gather(*tasks, return_exceptions=True)
            assert max(seen) > 1, "nothing was shared"
            while held(stage.engine):
                await asyncio.sleep(0.005)
            return made

    made = asyncio.run(ours())
    assert isinstance(made[4], asyncio.CancelledError)
    for number, (kind, more) in enumerate(asked):
        if number != 4:
            found = made[number]
            assert isinstance(found, torch.Tensor), found
            assert distance(found, theirs(reference, kind, seed=number, **more)) <= 1e-4, number


@pytest.mark.parametrize(
    ("more", "field", "says"),
    [
        ({"size": "100x64"}, "size", "both must be multiples of 16, and at most 8192. The nearest is 96x64."),
        ({"condition_video_keep": "last"}, "condition_video_keep", "of a video to go on from"),
        (
            {"given": image(PICTURE), "num_frames": 5, "condition_frame_indexes_vision": [0]},
            "condition_frame_indexes_vision",
            "none is given",
        ),
        ({"size": "99999x0"}, "size", "The nearest is 8192x16."),
        ({"size": "4096x4096", "num_frames": 189}, "num_frames", "make 786432 tokens, and 131072 is the most"),
        ({"prompt": "long" * 2049}, "prompt", "has 8196 tokens, and 8192 is the most"),
        ({"negative_prompt": "long" * 2049}, "negative_prompt", "has 8196 tokens"),
        ({"size": "big"}, "size", "must be WIDTHxHEIGHT"),
        ({"given": image(PICTURE)}, "num_frames", "set 'num_frames' above 1"),
        ({"given": video(CLIP, 24.0), "num_frames": 9, "condition_frame_indexes_vision": [3]}, "condition_frame_indexes_vision", "has 3"),
    ],
)
def test_what_cannot_be_is_refused_and_harms_nobody(checkpoint: Path, more: dict[str, Any], field: str, says: str) -> None:
    async def ours() -> None:
        async with Stage(checkpoint) as stage:
            beside = asyncio.create_task(stage.make("t2i"))
            with pytest.raises(RequestError, match=says) as refused:
                await stage.make("t2i", **more)
            assert refused.value.param == field
            assert (await beside).isfinite().all()

    asyncio.run(ours())


def test_frames_are_those_of_diffusers(checkpoint: Path, reference: Any) -> None:
    latents = theirs(reference, "t2v")
    frames = torch.cat(list(Autoencoder(context(checkpoint), encodes=False).decode(latents)))
    expected = theirs(reference, "t2v", output="pt").permute(0, 2, 3, 1)
    assert frames.shape == expected.shape == (9, 96, 64, 3)
    assert expected.std() > 0.01
    assert (frames.float() / 255 - expected).abs().max() <= 0.51 / 255


def test_forwards_that_are_filled_up_and_stay_where_they_are_give_the_same(checkpoint: Path, reference: Any) -> None:
    """As on a device that records them; here nothing is recorded."""

    async def ours() -> list[torch.Tensor]:
        async with Stage(checkpoint, budget=512) as stage:
            module = stage.engine._module
            module.replayed = Replayed(module.generation.velocities, "cpu")
            return list(await asyncio.gather(*(stage.make(kind) for kind in ("t2i", "t2v of odd size", "i2v", "t2i of odd size"))))

    for kind, found in zip(("t2i", "t2v of odd size", "i2v", "t2i of odd size"), asyncio.run(ours()), strict=True):
        assert distance(found, theirs(reference, kind)) <= 1e-4, kind


def test_layers_that_are_fetched_for_their_turn_give_the_same(checkpoint: Path, reference: Any) -> None:
    """Two requests that take turns, so that the order of layers is not the usual one."""

    async def ours() -> list[torch.Tensor]:
        async with Stage(checkpoint, budget=1) as stage:
            module = stage.engine._module
            for tower in (module.understanding, module.generation):
                tower.layer = Streamed(tower.layers, "cpu").use
            return list(await asyncio.gather(stage.make("t2i"), stage.make("t2v")))

    for kind, found in zip(("t2i", "t2v"), asyncio.run(ours()), strict=True):
        assert distance(found, theirs(reference, kind)) <= 1e-4, kind


@pytest.mark.parametrize(
    ("args", "says"), [({"offload": "layers"}, "on a CPU"), ({"guardrail": True}, "--set denoiser.args.guardrail=false")]
)
def test_what_cannot_run_here_stops_the_start(checkpoint: Path, args: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        asyncio.run(Stage(checkpoint, **args).engine.start())


def test_the_guardrail_is_asked_first_and_a_request_may_do_without(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", ModuleType("cosmos_guardrail"))
    vars(sys.modules["cosmos_guardrail"])["CosmosSafetyChecker"] = Checker

    async def ours() -> None:
        async with Stage(checkpoint, guardrail=True) as stage:
            with pytest.raises(RequestError, match="refuses this prompt"):
                await stage.make("t2i", "a bomb")
            await stage.make("t2i", "a bomb", guardrails=False)
            await stage.make("t2i", "a dog")
        async with Stage(checkpoint) as stage:
            with pytest.raises(RequestError, match="runs without them") as refused:
                await stage.make("t2i", guardrails=True)
            assert refused.value.param == "guardrails"

    asyncio.run(ours())
    decoder = Decoder()
    decoder.load(context(checkpoint, guardrail=True))
    for outputs, size, allowed, expected in (
        ((IMAGE,), 4, None, "halved"), ((VIDEO,), 4, None, "halved"), ((VIDEO,), 6, None, "refused"), ((VIDEO,), 4, False, "as it is"),
    ):  # fmt: skip
        state = decoder.open(Job("job", {"guardrails": allowed}, outputs, outputs))
        latents = Payload(LATENTS, torch.randn(4, 1 if outputs == (IMAGE,) else 2, size, 4), {"fps": 24.0, "seed": 1, "index": 0})
        plain = torch.cat(list(decoder.autoencoder.decode(latents.data))).numpy()
        if expected == "refused":
            decoder.run([(state, latents)])
            with pytest.raises(RequestError, match="refuses what was made"):
                list(decoder.flush(state))
        else:
            made = [*decoder.run([(state, latents)])[0], *decoder.flush(state)]
            shown = np.concatenate([np.atleast_3d(each.data).reshape(-1, *plain.shape[1:]) for each in made])
            assert (shown == (plain // 2 if expected == "halved" else plain)).all(), (outputs, expected)
            assert plain.max() > 1


class Checker:
    """With the methods of NVIDIA's, whose models nobody may pass on."""

    def to(self, device: str) -> None: ...

    def check_text_safety(self, prompt: str) -> bool:
        return "bomb" not in prompt

    def check_video_safety(self, frames: Any) -> Any:
        return None if frames.shape[1] == 96 else frames // 2
