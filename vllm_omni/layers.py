"""A recipe's settings as they are written: in a file, in a plugin's default, on the command line. One layer is a list of settings.

Knows which settings exist, not which values fit: what they mean for a graph, and which layer wins, is `settle.py`'s work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from vllm_omni.errors import NotFoundError, SettingError, did_you_mean

ANY = "*"
STAGE = {"devices": None, "replicas": None, "args": {ANY: None}, "vllm": {ANY: None}}
SCHEMA: Mapping[str, Any] = {
    "model": None,
    "graph": None,
    "vllm": None,
    "machine": {"device": None, "name": None, "count": None},
    "stages": {ANY: STAGE},
    "edges": {ANY: {"connector": None, "window": None}},
    "defaults": {ANY: None},
    "tested": {"date": None, "versions": {ANY: None}, "figures": {ANY: None}},
}
"""The keys a recipe may have; ANY is a name of the model's or of vLLM's."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value. `source` is the file or flag it comes from; `text` how a flag spelt it."""

    path: tuple[str, ...]
    value: Any
    source: str
    text: str | None = None

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def wrong(self, message: str) -> SettingError:
        """An error about this setting that says where it was made."""
        return SettingError(f"{self.source}: {message}", param=self.key)


def read_recipe(name: str) -> list[Setting]:
    """The settings of `--recipe NAME`: a file, or a shipped recipe such as `model/machine-goal`. Raises NotFoundError."""
    path = Path(name)
    if path.is_file():
        return read_text(path.read_text(encoding="utf-8", errors="surrogateescape"), name)
    shipped = dict(_shipped(files("vllm_omni_recipes"), ""))
    if name in shipped:
        return read_text(shipped[name].read_text(encoding="utf-8"), f"recipe {name}")
    raise NotFoundError(f"--recipe: there is neither a file nor a shipped recipe '{name}'.{did_you_mean(name, shipped)}", param="recipe")


def read_text(text: str, source: str) -> list[Setting]:
    """The settings of a YAML document. Raises SettingError that names the file, the line and the key."""
    return list(_flat(_parse(text, source) or {}, SCHEMA, (), source, None))


def read_assignment(assignment: str) -> list[Setting]:
    """The settings of `--set KEY=VALUE`. A key that starts with a stage's name means that stage; the value is read as YAML."""
    key, equals, text = assignment.partition("=")
    if not equals or not all(key.split(".")):
        raise SettingError(f"--set {assignment}: write it as KEY=VALUE, for example stages.NAME.replicas=2.", param="set")
    path = key.split(".")
    if path[0] not in SCHEMA and (len(path) == 1 or (path[1] not in STAGE and difflib.get_close_matches(path[0], SCHEMA))):
        hint = did_you_mean(path[0], SCHEMA) + (f" A request's default is set as defaults.{key}." if len(path) == 1 else "")
        raise SettingError(f"--set {assignment}: there is no setting '{path[0]}'.{hint}", param="set")
    return read_value(path if path[0] in SCHEMA else ["stages", *path], text, "--set")


def read_value(path: list[str], text: str, source: str) -> list[Setting]:
    """The settings of one value spelt on the command line. Below a setting of vLLM's, the path goes on into its mapping."""
    try:
        value = _parse(text, source)
    except SettingError:
        value = text  # what is no YAML is plain text
    schema: Mapping[str, Any] | None = SCHEMA
    for depth, key in enumerate(path):
        if schema is None and path[2:3] == ["vllm"]:
            return [Setting(tuple(path), value, source, text)]
        schema = _below(schema or {}, key, tuple(path[:depth]), source)
    return list(_flat(value, schema, tuple(path), source, text))


def _flat(node: Any, schema: Mapping[str, Any] | None, path: tuple[str, ...], source: str, text: str | None) -> Iterator[Setting]:
    if schema is None:
        yield Setting(path, node, source, text)
        return
    if not isinstance(node, dict):
        if node is None and text is None:
            return  # a key with nothing under it
        what = f"'{'.'.join(path)}'" if path else "the file"
        raise SettingError(f"{source}: {what} must be a mapping of {_names(schema)}, not {node!r}.", param=".".join(path) or None)
    for key, value in node.items():
        yield from _flat(value, _below(schema, key, path, source), (*path, key), source, None)


def _below(schema: Mapping[str, Any], key: Any, path: tuple[str, ...], source: str) -> Mapping[str, Any] | None:
    if isinstance(key, str) and (key in schema or ANY in schema):
        below: Mapping[str, Any] | None = schema.get(key, schema.get(ANY))
        return below
    where = f" in '{'.'.join(path)}'" if path else ""
    hint = did_you_mean(str(key), schema) if ANY not in schema else " Names are text."
    raise SettingError(f"{source}: there is no setting '{key}'{where}.{hint}", param=".".join((*path, str(key))))


def _names(schema: Mapping[str, Any]) -> str:
    return "names to values" if ANY in schema else ", ".join(schema)


def _shipped(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _shipped(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml"), entry


class _Loader(yaml.SafeLoader):
    """YAML's plain values; a key given twice is an error, and 1e-3 is a number, as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark and "\n" in text.strip() else ""
        raise SettingError(f"{source}{line}: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SettingError(f"{source}: {error}.") from None
