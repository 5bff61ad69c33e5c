"""`vllm-omni models`: every installed plugin with what it takes and gives; a broken one with its cause."""

from __future__ import annotations

import argparse
import json
from typing import Any

from vllm_omni import discovery
from vllm_omni.discovery import ALIASES, MODELS, Found
from vllm_omni.errors import PluginError

COLUMNS = ("name", "distribution", "version", "aliases", "takes", "gives", "graphs", "maturity", "licence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as a JSON list, with all names")


def run(args: argparse.Namespace) -> int:
    rows = [row(found) for found in discovery.installed()]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(table(rows) if rows else "No model plugin is installed.")
    return 0


def row(found: Found) -> dict[str, Any]:
    """What there is to say of a plugin, as plain values; `error` is why it cannot be used, else None."""
    known: dict[str, Any] = {
        "name": found.name, "names": list(found.names), "aliases": list(found.aliases), "distribution": found.distribution,
        "version": found.version, "takes": [], "gives": [], "graphs": [], "maturity": "broken", "licence": "", "summary": "", "error": None,
    }  # fmt: skip
    try:
        plugin = found.load()
        for name, group in [*((name, MODELS) for name in found.names), *((name, ALIASES) for name in found.aliases)]:
            discovery.find(name, group)
    except PluginError as error:
        return {**known, "error": error.message}
    return {
        **known,
        "takes": list(dict.fromkeys(kind.name for graph in plugin.graphs for kind in graph.takes)),
        "gives": list(dict.fromkeys(kind.name for graph in plugin.graphs for kind in graph.outputs)),
        "graphs": [graph.name for graph in plugin.graphs],
        "maturity": found.maturity(),
        "licence": plugin.licence,
        "summary": plugin.summary,
    }


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[column.upper() for column in COLUMNS], *([_cell(row[column]) for column in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(f"\n{' '.join(row['error'].split())}" for row in rows if row["error"])])


def _cell(value: Any) -> str:
    return (",".join(value) if isinstance(value, list) else str(value)) or "-"
