"""A tiny Cosmos3 with random weights in the published layout, and diffusers' pipeline for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(folder: Path) -> Any:
    """Bytes, and the special tokens that a prompt has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT)


def write(folder: Path, size: str) -> Path:
    """Two kinds: as the sizes Nano and Super are (SiLU), and as `edge` is (squared ReLU, the prompt's keys normed for generation only)."""
    from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler

    words = tokenizer(folder)
    kind = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True} if size == "edge" else {}
    torch.manual_seed(0)
    transformer = Cosmos3OmniTransformer(
        head_dim=16, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3,
        latent_channel=4, latent_patch_size=2, patch_latent_dim=16, vocab_size=len(words), rope_theta=5e6,
        rope_scaling={"mrope_section": [4, 2, 2], "rope_type": "default"}, **kind,
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.25 if weight.ndim > 1 else 0.1) + ("norm" in name))
    autoencoder = AutoencoderKLWan(
        base_dim=8, z_dim=4, in_channels=12, out_channels=12, is_residual=True, patch_size=2, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True], scale_factor_spatial=16, scale_factor_temporal=4,
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[0.9, 1.1, 1.3, 0.7],
    )  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    Cosmos3OmniPipeline(transformer, words, autoencoder, scheduler, enable_safety_checker=False).save_pretrained(folder)
    if size == "edge":  # as it is published
        index = folder / "model_index.json"
        told = json.loads(index.read_text())
        index.write_text(json.dumps({**told, "_class_name": "Cosmos3OmniDiffusersPipeline"}))
    return folder


def load(folder: Path) -> Any:
    """Diffusers' pipeline."""
    from diffusers import Cosmos3OmniPipeline

    made = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32, enable_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made
