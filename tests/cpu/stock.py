"""vLLM's own offline interface, as a program: reads what to do as JSON, and writes the tokens it generates."""

from __future__ import annotations

import json
import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    llm = LLM(**asked["engine"], disable_log_stats=True)
    params = SamplingParams(**asked["sampling"])
    conversations = [[{"role": "user", "content": prompt}] for prompt in asked["prompts"]]
    made = [llm.chat(conversation, params, use_tqdm=False)[0] for conversation in conversations]
    print(json.dumps([list(output.outputs[0].token_ids) for output in made]))
