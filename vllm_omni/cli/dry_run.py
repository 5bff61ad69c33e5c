"""A deployment as text: its recipe in YAML, each value with the layer it comes from. What is printed is itself a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import yaml

from vllm_omni.deployment import Deployment


def describe(deployment: Deployment) -> str:
    """The recipe; a value that was set inside a mapping is shown there."""
    recipe = asdict(deployment.recipe)
    for link in recipe["edges"].values():
        link["window"] = _size(link["window"])
    tree = {"model": deployment.model, "graph": recipe["graph"], "machine": {"device": recipe["device"]}}
    tree |= {group: recipe[group] for group in ("stages", "edges", "defaults")}
    lines = list(_lines(tree, (), {**recipe["sources"], "model": "command line"}))
    width = min(max(len(line) for line, source in lines if source), 72)
    shown = [f"{line:{width}}  # {source}" if source else line for line, source in lines]
    plugin = f"# plugin {deployment.plugin.name} ({deployment.package}), served as '{deployment.served_name}'"
    unchecked = "# what is under a stage's 'vllm' is checked by vLLM when it starts"
    return "\n".join([plugin, *([unchecked] if any(placement.vllm for placement in deployment.recipe.stages.values()) else []), *shown])


def _lines(node: Mapping[str, Any], path: tuple[str, ...], sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each line with the source of its value, "" for a line without one."""
    for key, value in node.items():
        here = (*path, key)
        dotted, indent = ".".join(here), "  " * len(path)
        if isinstance(value, Mapping) and value and (dotted not in sources or any(each.startswith(f"{dotted}.") for each in sources)):
            yield f"{indent}{_yaml(key)}:", ""
            yield from _lines(value, here, sources)
        elif value not in ({}, ()):
            source = next((sources[name] for end in range(len(here), 0, -1) if (name := ".".join(here[:end])) in sources), "")
            yield f"{indent}{_yaml(key)}: {_yaml(value)}", source


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


def _size(window: int) -> int | str:
    return f"{window >> 20}MiB" if window % (1 << 20) == 0 else window
