"""An object by its dotted name, `package.module:Name`."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from vllm_omni.errors import PluginError, did_you_mean

_ONE = threading.Lock()
"""Stages of one process start in threads, and packages that import parts of themselves late break when two begin them at once."""


def load_object(name: str) -> Any:
    """The object. Raises PluginError, with the cause, if it cannot be imported."""
    module_name, _, attribute = name.partition(":")
    try:
        with _ONE:
            module = importlib.import_module(module_name)
    except Exception as error:  # a plugin's module may fail in any way
        raise PluginError(f"Cannot import '{module_name}' (for {name}): {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        raise PluginError(f"Module '{module_name}' has no '{attribute}'.{did_you_mean(attribute, known)}") from None
