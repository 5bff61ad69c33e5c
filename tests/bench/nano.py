"""Cosmos3 at the Nano size with random weights, on a GPU: ours in this process, and diffusers' own, for comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "model_plugins/cosmos3/tests"))
import tiny_cosmos3

VAE = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "is_residual": True,
    "temperal_downsample": [False, True, True], "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_temporal": 4,
    "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
}  # fmt: skip
PROMPT = (
    "A tidy robot arm lifts a small red cube from a wooden table and sets it on a blue tray while soft morning light falls from the left "
    "window; the camera stays still and the motion is smooth, precise and slow. The table carries a ruler, a white mug and a folded cloth. "
)


def folder(where: Path) -> Path:
    """A checkpoint without weights: what its parts are, as the reference writes it."""
    from diffusers import UniPCMultistepScheduler

    for part, config in {"transformer": {}, "vae": VAE}.items():
        (where / part).mkdir(parents=True)
        (where / part / "config.json").write_text(json.dumps(config))
    (where / "model_index.json").write_text(json.dumps({"_class_name": "Cosmos3OmniPipeline"}))
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0).save_pretrained(where / "scheduler")
    tiny_cosmos3.tokenizer(where).save_pretrained(where / "text_tokenizer")
    return where


def ours(where: Path, **args: Any) -> Any:
    """A running model of ours, in this process."""
    from vllm_omni.deployment import Deployment
    from vllm_omni.omni import Omni
    from vllm_omni.recipe import Link, Placement, Recipe
    from vllm_omni_cosmos3.plugin import GRAPH, PLUGIN

    stages = {
        stage.name: Placement(args={n: v for n, v in args.items() if n in {a.name for a in stage.all_args}}) for stage in GRAPH.stages
    }
    recipe = Recipe(GRAPH.name, "cuda", stages, {edge.name: Link() for edge in GRAPH.edges})
    return Omni(Deployment("nano", "nano", PLUGIN, "vllm_omni_cosmos3", GRAPH, str(where), recipe), inline=True)


def theirs(where: Path, device: str = "cuda", dtype: Any = torch.bfloat16) -> Any:
    """Diffusers' pipeline with random weights."""
    from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler

    with torch.device("meta"):
        transformer = Cosmos3OmniTransformer()
    transformer = transformer.to(dtype).to_empty(device=device)
    chance = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.02, generator=chance)
            else:
                weight.fill_(float("norm" in name))
    config = transformer.config
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    transformer.rotary_emb.inv_freq = (1.0 / (config.rope_theta ** (even / config.head_dim))).to(device)
    torch.manual_seed(0)
    autoencoder = AutoencoderKLWan(**VAE).to(dtype).to(device)
    scheduler = UniPCMultistepScheduler.from_pretrained(where / "scheduler")
    words = tiny_cosmos3.tokenizer(where)
    made = Cosmos3OmniPipeline(transformer.eval(), words, autoencoder.eval(), scheduler, enable_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made
