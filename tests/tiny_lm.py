"""A tiny language model with random weights, in the real layout of its family, whose every token is readable text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
"""The range of the weights makes greedy tokens differ from step to step."""


def write(folder: Path, seed: int = 0, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A Qwen3 checkpoint with its tokenizer; `changes` are of its configuration."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**{**SHAPE, **changes}, eos_token_id=2, bos_token_id=None, pad_token_id=0)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, size: int = VOCABULARY) -> None:
    """A token for each printable character, and short words for the rest of the vocabulary."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    words = ["Ġ" + a + b + c + d for d in ("", *"abcdefghijklmnop") for a in "bdfgklmnprst" for b in "aeiou" for c in "nrstlm"]
    tokens = [*SPECIAL, *letters, *words][:size]
    level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for index, token in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {**level, "add_prefix_space": False},
        "decoder": {**level, "add_prefix_space": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "merges": [],
            "vocab": {token: index for index, token in enumerate(tokens)},
        },
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "model_max_length": 2048}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
