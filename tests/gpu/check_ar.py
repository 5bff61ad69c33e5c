"""An out-of-tree model's hidden states through stage processes on one card, against transformers.

`PYTHONPATH=tests:tests/cpu:… python tests/gpu/check_ar.py OUT.json`. The model is tiny, in float32;
eager and with CUDA graphs; the default runner.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hooked
import numpy as np
import talk
import tiny_lm
import torch

from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import ACTION, TEXT

COUNT = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


async def run(folder: Path, eager: bool) -> dict[str, Any]:
    deployment = talk.deployment(
        folder, hooked.GRAPH, max_num_batched_tokens=64, max_num_seqs=4, enable_prefix_caching=False, enforce_eager=eager
    )
    deployment = replace(deployment, recipe=replace(deployment.recipe, device=DEVICE))
    began = time.perf_counter()
    async with AsyncOmni(deployment) as omni:
        started = time.perf_counter() - began
        asked = [omni.generate(p, (TEXT, ACTION), temperature=0.0, min_tokens=COUNT, max_tokens=COUNT) for p in hooked.PROMPTS]
        results = await asyncio.gather(*asked)
        answers = [(result.text, result.actions.copy()) for result in results]
        runner = {payload.meta["runner"] for result in results for payload in result.of(ACTION)}
    expected = hooked.reference(folder, COUNT)
    return {
        "start_s": started, "runner": sorted(runner),
        "text_equal": [said == right for (said, _), (right, _) in zip(answers, expected, strict=True)],
        "farthest": [
            np.abs(states - shown.reshape(-1)[: states.size].reshape(states.shape)).max(axis=(0, 2)).tolist()
            for (_, shown), (_, states) in zip(answers, expected, strict=True)
        ],
        "rows": [[len(shown), len(states)] for (_, shown), (_, states) in zip(answers, expected, strict=True)],
    }  # fmt: skip


if __name__ == "__main__":
    folder = tiny_lm.write(Path(tempfile.mkdtemp()), dtype="float32")
    found = {}
    for name, eager in (("eager", True), ("graphs", False)):
        found[name] = asyncio.run(run(folder, eager))
        print(name, json.dumps(found[name]), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
