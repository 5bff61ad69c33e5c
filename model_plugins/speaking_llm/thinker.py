"""The thinker: a small language model unless the recipe names another one. What it says is text; it knows nothing of voices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni.api import ARModule, Job, Payload, StageContext, text
from vllm_omni_speaking_llm.weights import thinker_folder

OWN = {"override_generation_config": {"temperature": 0.2, "top_p": 0.9}}
"""What SmolLM2's card recommends, and its generation config lacks."""
EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
"""On a CPU: ready in seconds rather than after a minute of compiling, for about a tenth of the speed."""


class Thinker(ARModule):
    def load(self, ctx: StageContext) -> Mapping[str, Any]:
        where = EAGER if ctx.device == "cpu" else {}
        if "model" in ctx.vllm:
            return where
        return {"model": thinker_folder(), "max_model_len": 2048, "use_tqdm_on_load": False, **OWN, **where}

    def ready(self, job: Job, parts: Sequence[Payload]) -> Sequence[Payload] | None:
        if all(part.meta.get("verbatim") for part in parts):
            return [text(part.data) for part in parts]
        return None
