"""The arguments that say which model runs and how, the same for every command that runs one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni.deployment import Deployment


def add_source(parser: argparse.ArgumentParser) -> None:
    """Where the model comes from, and which of its graphs is meant."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, a hub id (owner/name) or a plugin's alias")
    owner = "the plugin that owns MODEL: a model type, a class of model_index.json, an alias or a distribution"
    parser.add_argument("--plugin", "--model-class-name", metavar="NAME", help=owner)
    parser.add_argument("--graph", metavar="NAME", help="one of the plugin's graphs")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    parser.add_argument("--hf-token", metavar="TOKEN", help="for gated and private hub ids (default: $HF_TOKEN, or the saved login)")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """How it runs."""
    parser.add_argument("--recipe", metavar="FILE", help="a recipe file, or the name of a shipped one")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a recipe setting: STAGE.replicas=2; repeatable")


def deploy(args: argparse.Namespace, **more: Any) -> Deployment:
    """The deployment that these arguments describe."""
    from vllm_omni import settle

    if "recipe" in args:
        more |= {"recipe": args.recipe, "settings": args.set}
    return settle.deploy(args.model, plugin=args.plugin, graph=args.graph, revision=args.revision, token=args.hf_token, **more)
