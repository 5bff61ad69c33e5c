"""vLLM's engine in this process, as `compat/` wraps it. Each test has the only one: the end of one takes vLLM's globals along."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import talk

import vllm_omni.compat.preload  # noqa: F401 - before anything imports vLLM
from vllm_omni.compat.engine import InProcessEngine
from vllm_omni.engine import ARModule, Job
from vllm_omni.errors import OmniError, RequestError, SettingError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import text


def test_sixteen_at_once_under_preemption_are_stock_vllm_token_for_token(tiny: Path, stock: dict[str, list[int]]) -> None:
    engine = InProcessEngine({"model": str(tiny), **talk.SMALL, "num_gpu_blocks_override": 24, "max_model_len": 256})
    scheduler = engine._engine.engine_core.engine_core.scheduler
    prompts = {prompt: ARModule().prompt(Job("r"), [text(prompt)], engine.tokenizer) for prompt in talk.PROMPTS}
    preempted = set()
    made: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add(name, prompt, engine.sampling({**talk.GREEDY, "max_tokens": 120}))
    while engine.busy:
        for output in engine.step():
            made[output.request_id] += output.outputs[0].token_ids
        preempted |= {request.request_id for request in scheduler.waiting if request.num_preemptions}
    assert engine.blocks_in_use() == 0
    engine.shutdown()
    assert len({tuple(answer) for answer in stock.values()}) == len(talk.PROMPTS), "the reference reacts to the prompt"
    assert len(preempted) >= 4, "too little was preempted for this to show anything"
    assert made == stock


@pytest.mark.parametrize(("setting", "says"), [("max_model_length", "max_model_len"), ("tensor_parallel", "tensor_parallel_size")])
def test_an_engine_argument_that_vllm_does_not_have_is_told_with_the_nearest(setting: str, says: str, tiny: Path) -> None:
    with pytest.raises(SettingError, match=says):
        InProcessEngine({"model": str(tiny), setting: 1})


def test_a_folder_that_is_not_there_is_told_before_vllm_looks(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no model folder"):
        InProcessEngine({"model": str(tmp_path / "gone")})


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    deployment = replace(talk.deployment(tmp_path), folder="")
    with pytest.raises(OmniError, match="which model to load"):
        asyncio.run(AsyncOmni(deployment, inline=True).start())


def test_the_checkpoints_generation_config_holds_where_a_client_says_nothing(tiny: Path) -> None:
    engine = InProcessEngine({"model": str(tiny), **talk.SMALL, "override_generation_config": {"temperature": 0.25, "top_k": 7}})
    assert (engine.sampling({}).temperature, engine.sampling({}).top_k) == (0.25, 7)
    assert engine.sampling({"temperature": 0.5, "top_k": None}).temperature == 0.5
    engine.shutdown()


def test_a_text_that_comes_in_pieces_from_another_stage_is_one_text() -> None:
    class Tokenizer:
        chat_template = None

        def encode(self, said: str) -> list[str]:
            return [said]

    assert ARModule().prompt(Job("r"), [text("Hel"), text("lo wor"), text("ld")], Tokenizer()) == ["Hello world"]
    assert ARModule().prompt(Job("r"), [], Tokenizer()) == []


def test_a_template_that_refuses_a_conversation_refuses_the_request(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(RequestError, match="Roles must alternate"):
        ARModule().prompt(Job("r"), [text("a")], tokenizer)
