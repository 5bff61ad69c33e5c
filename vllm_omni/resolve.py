"""Which installed plugin owns MODEL, asked in one fixed order: named by the user, by the checkpoint, or claimed by a plugin."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni import discovery
from vllm_omni.discovery import Found
from vllm_omni.errors import NotFoundError, PluginError, SettingError, did_you_mean
from vllm_omni.hub import Checkpoint, open_model
from vllm_omni.plugin import ModelPlugin

NAMED_IN = (("config.json", "model_type"), ("model_index.json", "_class_name"))
"""The files in which a checkpoint names its family, and the keys."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """MODEL with its owner. `config` is what the checkpoint's `config.json`, or else `model_index.json`, holds ({} without either)."""

    model: str
    found: Found
    plugin: ModelPlugin
    checkpoint: Checkpoint | None
    config: Mapping[str, Any]

    def folder(self) -> str:
        """The checkpoint on this machine, fetched if need be; "" if the plugin brings its own or needs none."""
        return self.checkpoint.fetch() if self.checkpoint is not None else ""


def resolve(model: str, *, plugin: str | None = None, revision: str | None = None, token: str | None = None) -> Resolved:
    """The owner of MODEL: a plugin's alias, a folder or a hub id. Fetches no weights.

    Raises NotFoundError if there is no such model or plugin, PluginError if two claim it or the owner does not load.
    """
    alias = discovery.find(model, discovery.ALIASES)
    found = _named(plugin) if plugin is not None else alias
    if alias is not None and found == alias:
        for name, value in (("--revision", revision), ("--hf-token", token)):
            if value is not None:
                raise SettingError(f"{name} has no effect: '{model}' is an alias of plugin {alias}. Leave it out.", param=name)
        return Resolved(model, alias, alias.load(), None, {})
    _refuse_misspelt(model)
    checkpoint = open_model(model, revision, token)
    config: Mapping[str, Any] = {}
    for file, key in NAMED_IN:
        content = _object(checkpoint, file)
        named = discovery.find(content[key]) if found is None and key in content else None
        found, config = found or named, content if named else config or content
        if found and config:
            break
    owner = found or _by_claim(checkpoint)
    return Resolved(model, owner, owner.load(), checkpoint, config)


def _named(plugin: str) -> Found:
    """What `--plugin` names: a model type, an alias or a distribution."""
    installed = discovery.installed()
    owners = [found for found in installed if plugin in (*found.names, *found.aliases, found.distribution)]
    known = [name for found in installed for name in (*found.names, *found.aliases, found.distribution)]
    found = discovery.sole(f"'{plugin}'", owners)
    if found is None:
        raise NotFoundError(f"There is no plugin '{plugin}'.{did_you_mean(plugin, known) or ' None is installed.'}", param="plugin")
    return found


def _refuse_misspelt(model: str) -> None:
    """A word close to an alias, and no folder, is not looked for on the hub."""
    aliases = [alias for found in discovery.installed() for alias in found.aliases]
    if "/" not in model and not Path(model).exists() and difflib.get_close_matches(model, aliases, n=1, cutoff=0.6):
        raise NotFoundError(f"There is no model '{model}'.{did_you_mean(model, aliases)}", param="model")


def _object(checkpoint: Checkpoint, file: str) -> Mapping[str, Any]:
    content = checkpoint.get(file)
    return content if isinstance(content, dict) else {}


def _by_claim(checkpoint: Checkpoint) -> Found:
    """The plugin whose claim accepts the files. A claim that fails is passed over, and told if nobody else has one."""
    owners, broken = [], []
    installed = discovery.installed()
    for found in installed:
        try:
            owners += [found] if found.claims_checkpoint(checkpoint) else []
        except PluginError as error:
            broken.append(f" {error}")
    owner = discovery.sole(f"The checkpoint {checkpoint.where}", owners)
    if owner is not None:
        return owner
    names = [f"its {key} is '{name}'" for file, key in NAMED_IN if (name := _object(checkpoint, file).get(key))]
    known = ", ".join(name for found in installed for name in (*found.names, *found.aliases)) or "none"
    raise NotFoundError(
        f"No installed plugin owns {checkpoint.where} ({' and '.join(names) or 'it names no model type'}). "
        f"Installed: {known}. Install the plugin of its family, or choose one with --plugin.{''.join(broken)}",
        param="model",
    )
