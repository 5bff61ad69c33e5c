"""A recipe's settings as they are written: in a file, in a plugin's default, on the command line. One layer is a list of settings.

Knows which settings exist, not which values fit: what they mean for a graph, and which layer wins, is `settle.py`'s work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from vllm_omni.errors import NotFoundError, RequestError, SettingError, did_you_mean
from vllm_omni.param import Param

ANY = "*"
STAGE = {"devices": None, "replicas": Param("replicas", int, minimum=1), "args": {ANY: None}, "vllm": {ANY: None}}
EDGE = {"connector": Param("connector", str, choices=("auto", "inline", "shm")), "window": None}
SCHEMA: Mapping[str, Any] = {
    "model": None,
    "graph": Param("graph", str),
    "vllm": None,
    "machine": {"device": Param("device", str), "name": Param("name", str), "count": Param("count", int, minimum=1)},
    "stages": {ANY: STAGE},
    "edges": {ANY: EDGE},
    "defaults": {ANY: None},
    "tested": {"date": None, "versions": {ANY: None}, "figures": {ANY: None}},
}
"""The keys a recipe may have; ANY is a name of the model's or of vLLM's. A Param says which values fit every model."""


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

    def checked(self, param: Param) -> Any:
        """The value as the parameter's type. Raises SettingError."""
        spelt = param.type is str and self.text is not None  # on the command line 1 may be a text
        try:
            return replace(param, name=self.key).check(self.text if spelt else self.value)
        except RequestError as error:
            raise self.wrong(error.message) from None


def shipped() -> dict[str, Path]:
    """The recipes that came with the core, by name (`model/machine-goal`)."""
    folder = Path(str(files("vllm_omni_recipes")))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}


def read_recipe(name: str) -> list[Setting]:
    """The settings of `--recipe NAME`: a file, or a shipped recipe. Raises NotFoundError."""
    path = Path(name)
    if path.is_file():
        return read_text(path.read_text(encoding="utf-8", errors="surrogateescape"), name)
    known = shipped()
    if name in known:
        return read_text(known[name].read_text(encoding="utf-8"), f"recipe {name}")
    raise NotFoundError(f"--recipe: there is neither a file nor a shipped recipe '{name}'.{did_you_mean(name, known)}", param="recipe")


def read_text(text: str, source: str) -> list[Setting]:
    """The settings of a YAML document. Raises SettingError that names the file, the line and the key."""
    return list(flat(_parse(text, source) or {}, source))


def read_assignment(assignment: str) -> list[Setting]:
    """The settings of `--set KEY=VALUE`. A key that starts with a stage's name means that stage; the value is read as YAML."""
    key, equals, text = assignment.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        raise SettingError(f"--set {assignment}: write it as KEY=VALUE, for example stages.NAME.replicas=2.", param="set")
    if path[0] not in SCHEMA and (len(path) == 1 or (path[1] not in STAGE and difflib.get_close_matches(path[0], SCHEMA))):
        hint = did_you_mean(path[0], SCHEMA) + (f" A request's default is set as defaults.{key}." if len(path) == 1 else "")
        raise SettingError(f"--set {assignment}: there is no setting '{path[0]}'.{hint}", param="set")
    return read_value(path if path[0] in SCHEMA else ["stages", *path], text, "--set")


def read_value(path: Iterable[str], text: str, source: str) -> list[Setting]:
    """The settings of one value spelt on the command line."""
    try:
        value = _parse(text, source)
    except SettingError:
        value = text  # what is no YAML is plain text
    return list(flat(value, source, tuple(path), text))


def flat(node: Any, source: str, path: tuple[str, ...] = (), text: str | None = None) -> Iterator[Setting]:
    """The settings of a document, or of the part of it at `path`. Raises SettingError that names the key."""
    schema = _schema(path, source)
    if schema is None or isinstance(schema, Param):
        setting = Setting(path, node, source, text)
        yield setting if schema is None else replace(setting, value=setting.checked(schema))
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from flat(value, source, (*path, key))
    elif node is not None or text is not None:  # a key of a file may have nothing under it
        what = f"'{'.'.join(path)}'" if path else "the file"
        known = "names to values" if ANY in schema else ", ".join(schema)
        raise SettingError(f"{source}: {what} must be a mapping of {known}, not {node!r}.", param=".".join(path) or None)


def _schema(path: tuple[str, ...], source: str) -> Any:
    """What SCHEMA has at this path. Below a setting of vLLM's, the path goes on into its mapping."""
    schema: Any = SCHEMA
    for depth, key in enumerate(path):
        if schema is None and path[2:3] == ("vllm",):
            return None
        known = schema if isinstance(schema, Mapping) else {}
        if not isinstance(key, str) or not {key, ANY} & known.keys():
            where = f" in '{'.'.join(path[:depth])}'" if depth else ""
            hint = did_you_mean(str(key), known) if ANY not in known else " Names are text."
            raise SettingError(f"{source}: there is no setting '{key}'{where}.{hint}", param=".".join((*path[:depth], str(key))))
        schema = known.get(key, known.get(ANY))
    return schema


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
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark and "\n" in text.strip() else ""
        raise SettingError(f"{source}{line}: {getattr(error, 'problem', error)}.") from None
