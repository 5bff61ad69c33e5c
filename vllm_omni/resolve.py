"""Which installed plugin owns MODEL, asked in one fixed order: named by the user, by the checkpoint, or claimed by a plugin."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni import discovery
from vllm_omni.discovery import Found
from vllm_omni.errors import NotFoundError, PluginError, did_you_mean
from vllm_omni.hub import Checkpoint, open_model, refuse_source
from vllm_omni.plugin import ModelPlugin

NAMED_IN = (("config.json", "model_type"), ("model_index.json", "_class_name"))
"""The files in which a checkpoint names its family, and the keys."""


class TextOnlyError(NotFoundError):
    """No plugin owns the checkpoint, and vLLM may serve it by itself: it names an architecture."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """MODEL with its owner. `config` is what the checkpoint's `config.json`, or else `model_index.json`, holds ({} without either)."""

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
        refuse_source(f"'{model}' is an alias of plugin {alias}", revision, token)
        return Resolved(alias, alias.load(), None, {})
    _refuse_misspelt(model)
    checkpoint = open_model(model, revision, token)
    contents = {key: checkpoint.get(file) for file, key in NAMED_IN}
    configs = {key: content for key, content in contents.items() if isinstance(content, dict) and content}
    config = next(iter(configs.values()), {})
    for key, content in configs.items():
        if found is None and (found := discovery.find(content.get(key, ""))):
            config = content
    if found is None:
        found = _by_claim(checkpoint, [f"its {key} is '{content[key]}'" for key, content in configs.items() if content.get(key)])
    return Resolved(found, found.load(), checkpoint, config)


def _named(plugin: str) -> Found:
    """What `--plugin` names: a model type, an alias or a distribution."""
    installed = discovery.installed()
    found = discovery.sole(f"'{plugin}'", (found for found in installed if plugin in found.called))
    if found is None:
        known = [name for found in installed for name in found.called]
        raise NotFoundError(f"There is no plugin '{plugin}'.{did_you_mean(plugin, known) or ' None is installed.'}", param="plugin")
    return found


def _refuse_misspelt(model: str) -> None:
    """A word close to an alias, and no folder, is not looked for on the hub."""
    aliases = [alias for found in discovery.installed() for alias in found.aliases]
    if "/" not in model and not Path(model).exists() and difflib.get_close_matches(model, aliases, n=1, cutoff=0.6):
        raise NotFoundError(f"There is no model '{model}'.{did_you_mean(model, aliases)}", param="model")


def _by_claim(checkpoint: Checkpoint, names: list[str]) -> Found:
    """The plugin whose claim accepts the files. A claim that fails is passed over, and told if nobody else has one."""
    owners, broken = [], []
    installed = discovery.installed()
    for found in installed:
        try:
            if any(found.use(claim, lambda accepts: accepts(checkpoint)) for claim in found.claims):
                owners.append(found)
        except PluginError as error:
            broken.append(f" {error}")
    owner = discovery.sole(f"The checkpoint {checkpoint.where}", owners)
    if owner is not None:
        return owner
    known = ", ".join(name for found in installed for name in (*found.names, *found.aliases)) or "none"
    config = checkpoint.get("config.json")
    plain = not broken and "model_index.json" not in checkpoint and isinstance(config, dict) and bool(config.get("architectures"))
    raise (TextOnlyError if plain else NotFoundError)(
        f"No installed plugin owns {checkpoint.where} ({' and '.join(names) or 'it names no model type'}). "
        f"Installed: {known}. Install the plugin of its family, or choose one with --plugin.{''.join(broken)}",
        param="model",
    )
