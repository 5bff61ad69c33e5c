"""A language model of ours on stock vLLM that gives its hidden states along; and a stage that shows them to a client as actions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni.api import (
    ACTION,
    AR,
    SAMPLING,
    TEXT,
    ARModule,
    Edge,
    Job,
    Kind,
    ModelPlugin,
    OneShot,
    OneShotModule,
    Payload,
    Stage,
    StageGraph,
    action,
    text,
)

HIDDEN = Kind("hidden", "float32 [tokens, layers, width], meta at: how many tokens came before")
LAYERS = (0, 1)
"""The input embeddings, and the output of the first layer; the last one is added."""
POISON = "poison"
"""Requests whose ids begin so make the model raise."""
PROMPTS = ["a", "and then " * 6, "so it goes " * 12]

thinker = Stage("thinker", AR("hooked:Module"), takes=(TEXT,), gives=(TEXT, HIDDEN), params=SAMPLING)
shower = Stage("shower", OneShot("hooked:Shower"), takes=(HIDDEN,), gives=(ACTION,))
GRAPH = StageGraph("hooked", edges=(Edge(thinker, shower, HIDDEN),), outputs={TEXT: thinker, ACTION: shower})
PLUGIN = ModelPlugin("hooked", graphs=(GRAPH,))


class Module(ARModule):
    model = "hooked_model:Thinker"


class Shower(OneShotModule):
    def open(self, job: Job) -> list[int]:
        return [0]

    def run(self, rows: Sequence[tuple[list[int], Payload]]) -> Sequence[Sequence[Payload]]:
        return [[self._show(seen, chunk)] for seen, chunk in rows]

    def _show(self, seen: list[int], chunk: Payload) -> Payload:
        if chunk.meta["at"] != seen[0]:
            raise ValueError(f"{seen[0]} tokens had come, and the next chunk is at {chunk.meta['at']}")
        seen[0] += len(chunk.data)
        rows: Any = chunk.data
        return action(rows.reshape(len(rows), -1).cpu().numpy(), runner=chunk.meta["runner"], again=chunk.meta["again"])


def reference(folder: Path, count: int) -> list[tuple[str, Any]]:
    """For each prompt what transformers answers greedily, and the hidden states of all tokens but the last: [tokens, layers, width]."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model, tokenizer = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        ids = Module().prompt(None, [text(prompt)], tokenizer)  # type: ignore[arg-type]
        with torch.no_grad():
            answer = model.generate(torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
            states = model(answer[:, :-1], output_hidden_states=True).hidden_states
        layers = torch.stack([states[index][0] for index in (*LAYERS, -1)], dim=1)
        found.append((tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True), layers.numpy()))
    return found
