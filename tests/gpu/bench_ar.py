"""The AR engine beside vLLM's own `LLM.generate`, in one process on one card: tokens a second at 1, 8 and 64 requests.

`PYTHONPATH=tests:tests/cpu:… python tests/gpu/bench_ar.py OUT.json`. The model has the shape of a Qwen3 of 1.7 billion weights, with a
vocabulary of 3,072 and random weights; prompts of 100 tokens, answers of 200, greedy. Both sides detokenise; ours
streams, the engine by itself (`engine`) and behind the orchestrator (`omni`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import talk
import tiny_lm

import vllm_omni.compat.preload  # noqa: F401 - before anything imports vLLM
from vllm_omni.api import AR, SAMPLING, TEXT, ARModule, Job, Payload, Stage, StageGraph, text
from vllm_omni.omni import AsyncOmni
from vllm_omni.recipe import Placement, Recipe

NEW = int(os.environ.get("BENCH_NEW", "200"))
COUNTS = (1, 8, 64)
ROUNDS = 6
SMALL = os.environ.get("BENCH_SMALL") == "1"
"""Everything on a CPU, with few layers: to see that the program runs."""
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 3072, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "eos_token_id": 2,
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 1024, "max_num_batched_tokens": 8192, "max_num_seqs": 64, "enable_prefix_caching": False,
    "dtype": "bfloat16",
    **({"kv_cache_memory_bytes": 1 << 28, "enforce_eager": True} if SMALL else {"gpu_memory_utilization": 0.3}),
}  # fmt: skip
rng = random.Random(0)


class Ids(ARModule):
    """A prompt is written as the ids themselves."""

    def prompt(self, job: Job, parts: Any, tokenizer: Any) -> list[int]:
        return [int(word) for word in parts[0].data.split()]


talker = Stage("talker", AR("bench_ar:Ids"), takes=(TEXT,), gives=(TEXT,), params=SAMPLING)
GRAPH = StageGraph("ids", stages=(talker,), outputs={TEXT: talker})


def prompts(count: int) -> list[list[int]]:
    return [[rng.randrange(3, 3072) for _ in range(100)] for _ in range(count)]


def stock(llm: Any, count: int, new: int) -> tuple[float, int]:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": prompt} for prompt in prompts(count)]
    began = time.perf_counter()
    made = llm.generate(asked, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began, sum(len(output.outputs[0].token_ids) for output in made)


Source = Callable[[str, dict[str, Any]], AsyncIterator[Payload]]


def engine_of(omni: AsyncOmni) -> Source:
    """The stage's engine by itself, without the orchestrator and the stage's host before it."""
    engine = omni.orchestrator._replicas._hosts[0]._engine  # type: ignore[attr-defined]
    numbers = itertools.count()

    async def inputs(prompt: str) -> AsyncIterator[Payload]:
        yield text(prompt)

    return lambda prompt, params: engine.stream(Job(f"bench-{next(numbers)}", params), inputs(prompt))


async def ours(source: Source, count: int, new: int) -> tuple[float, int, int]:
    asked = [" ".join(map(str, prompt)) for prompt in prompts(count)]
    params = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True}

    async def one(prompt: str) -> tuple[int, int]:
        made = [payload async for payload in source(prompt, params)]
        return sum(payload.meta["tokens"] for payload in made), len(made)

    began = time.perf_counter()
    made = await asyncio.gather(*map(one, asked))
    return time.perf_counter() - began, sum(tokens for tokens, _ in made), sum(chunks for _, chunks in made)


class Trace:
    """When the steps of an engine began and ended, in seconds since this was made."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.step, self.began = engine, engine.step, time.perf_counter()
        self.steps: list[tuple[float, float, int]] = []
        engine.step = self

    def __call__(self) -> Any:
        began = time.perf_counter() - self.began
        outputs = self.step()
        self.steps.append((began, time.perf_counter() - self.began, self.engine.get_num_unfinished_requests()))
        return outputs

    def summary(self) -> dict[str, Any]:
        self.engine.step = self.step
        total = time.perf_counter() - self.began
        gaps = sum(after[0] - before[1] for before, after in zip(self.steps, self.steps[1:], strict=False))
        lengths = sorted(end - begin for begin, end, _ in self.steps)
        return {
            "total_ms": total * 1e3, "steps": len(lengths),
            "first_began_ms": self.steps[0][0] * 1e3, "last_ended_ms": self.steps[-1][1] * 1e3,
            "inside_ms": sum(lengths) * 1e3, "between_ms": gaps * 1e3, "median_ms": lengths[len(lengths) // 2] * 1e3,
            "longest_ms": [round(length * 1e3, 1) for length in lengths[-12:]],
            "first_steps": [(round(b * 1e3, 1), round(e * 1e3, 1), n) for b, e, n in self.steps[:8]],
        }  # fmt: skip


def traced(engine: Any, work: Callable[[], Any]) -> dict[str, Any]:
    trace = Trace(engine)
    work()
    return trace.summary()


async def traced_async(source: Source, omni: AsyncOmni, count: int) -> dict[str, Any]:
    engine = omni.orchestrator._replicas._hosts[0]._engine._engine._engine  # type: ignore[attr-defined]
    trace, loop = Trace(engine), time.thread_time()
    await ours(source, count, NEW)
    return {**trace.summary(), "event_loop_cpu_ms": (time.thread_time() - loop) * 1e3}


def main(out: str) -> None:
    import vllm
    from vllm import LLM

    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2} if SMALL else SHAPE
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape))
    tiny_lm.write_tokenizer(folder, 3072)
    figures: dict[str, Any] = {"vllm": vllm.__version__, "new_tokens": NEW}
    began = time.perf_counter()
    llm = LLM(str(folder), disable_log_stats=True, **ENGINE)
    figures["stock_start_s"] = time.perf_counter() - began

    async def measure() -> None:
        began = time.perf_counter()
        recipe = Recipe("ids", stages={"talker": Placement(vllm=ENGINE)})
        async with AsyncOmni(replace(talk.deployment(folder, GRAPH), recipe=recipe), inline=True) as omni:
            figures["our_start_s"] = time.perf_counter() - began
            sources: dict[str, Source] = {
                "engine": engine_of(omni), "omni": lambda prompt, params: omni.stream(prompt, **params)
            }  # fmt: skip
            for count in COUNTS:
                rounds: dict[str, list[float]] = {"stock": [], **{name: [] for name in sources}}
                for number in range(ROUNDS + 1):
                    seconds, tokens = stock(llm, count, NEW)
                    found = {"stock": tokens / seconds}
                    for name, source in sources.items():
                        seconds, made, chunks = await ours(source, count, NEW)
                        assert made == tokens == count * NEW, "each token once"
                        found[name] = made / seconds
                    for name, speed in found.items() if number else ():  # the first round warms up
                        rounds[name].append(round(speed, 1))
                best = {name: max(speeds) for name, speeds in rounds.items()}
                middle = {name: statistics.median(speeds) for name, speeds in rounds.items()}
                figures[f"{count}"] = {
                    "best_tok_s": best, "median_tok_s": middle, "chunks_a_request": chunks / count, "rounds": rounds,
                    "ratio_of_best": {name: round(best[name] / best["stock"], 3) for name in sources},
                    "ratio_of_median": {name: round(middle[name] / middle["stock"], 3) for name in sources},
                }  # fmt: skip
                if count == COUNTS[-1]:
                    figures["steps"] = {
                        "stock": traced(llm.llm_engine, partial(stock, llm, count, NEW)),
                        "engine": await traced_async(engine_of(omni), omni, count),
                    }  # fmt: skip
                print(count, json.dumps(figures[f"{count}"]), flush=True)

    asyncio.run(measure())
    Path(out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.modules["bench_ar"] = sys.modules["__main__"]
    main(sys.argv[1])
    os._exit(0)  # two engines in one process take each other's globals along when they end
