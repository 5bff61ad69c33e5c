"""MODEL and all that was said about it, settled into a Deployment: every value final, checked, and with the layer it came from.

One precedence: command line, then `--recipe`, then the plugin's default recipe, then what the declarations say. Starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllm_omni.deployment import Deployment
from vllm_omni.discovery import installed_vllm
from vllm_omni.errors import OmniError, PluginError, RequestError, SettingError, did_you_mean
from vllm_omni.graph import Stage, StageGraph
from vllm_omni.layers import Setting, read_assignment, read_recipe, read_text, read_value
from vllm_omni.param import Param
from vllm_omni.platform import platform
from vllm_omni.plugin import ModelPlugin
from vllm_omni.recipe import DEFAULT_WINDOW, Link, Placement, Recipe
from vllm_omni.resolve import Resolved, resolve

DECLARED = "declared"
FIXED = {
    "graph": Param("graph", str),
    "device": Param("device", str),
    "name": Param("name", str),
    "count": Param("count", int, minimum=1),
    "replicas": Param("replicas", int, minimum=1),
    "connector": Param("connector", str, choices=("auto", "inline", "shm")),
}
"""The settings that mean the same for every model, by the last word of their key."""
UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def deploy(
    model: str,
    *,
    plugin: str | None = None,
    recipe: str | None = None,
    settings: Iterable[str] = (),
    graph: str | None = None,
    served_name: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    flags: Mapping[str, str] | None = None,
    weights: bool = True,
) -> Deployment:
    """MODEL made ready to run.

    `settings` are `KEY=VALUE`, `flags` the engine flags meant for the main stage (`{"max-model-len": "4096"}`). Without `weights`
    nothing but configuration is fetched, and the deployment can be shown but not run. Raises OmniError for whatever is wrong,
    before weights are fetched.
    """
    said = [*(read_recipe(recipe) if recipe is not None else ()), *(each for text in settings for each in read_assignment(text))]
    said += _named_graph(graph)
    owner = resolve(model, plugin=plugin, revision=revision, token=token)
    default = _default(owner)
    chosen, source = _graph(owner, [*default, *said])
    default = [setting for setting in default if not _for_another_graph(setting, owner.plugin, chosen)]
    settled = settle(chosen, [*default, *said, *_for_main(chosen, flags or {})], {"graph": source})
    return Deployment(
        model=model, served_name=served_name or model, plugin=owner.plugin, package=owner.found.package, graph=chosen,
        folder=owner.folder() if weights else "", recipe=settled,
    )  # fmt: skip


def settle(graph: StageGraph, settings: Iterable[Setting], sources: Mapping[str, str]) -> Recipe:
    """The recipe that these settings, later ones first, and the declarations give. Raises SettingError that names source and key."""
    device = detected_device()
    tree: dict[str, Any] = {}
    origin = {**sources, "machine.device": "detected"}
    for setting in settings:
        _put(tree, setting.path, _checked(setting, graph, device))
        origin[setting.key] = setting.source
    stages = {stage.name: _placement(stage, tree.get("stages", {}).get(stage.name, {})) for stage in graph.stages}
    for name, placement in stages.items():
        beyond = [number for number in placement.devices if number >= tree.get("machine", {}).get("count", number + 1)]
        if beyond:
            key, count = f"stages.{name}.devices", tree["machine"]["count"]
            message = f"{origin[key]}: '{key}' names device {beyond[0]}, but of 'machine.count' {count} the last is {count - 1}."
            raise SettingError(message, param=key)
    edges = {edge.name: Link(**tree.get("edges", {}).get(edge.name, {})) for edge in graph.edges}
    declared = {name: param.default for name, param in graph.params.items() if param.default is not None}
    recipe = Recipe(graph.name, device, stages, edges, {**declared, **tree.get("defaults", {})}, origin)
    return replace(recipe, sources={**dict.fromkeys(_keys(recipe), DECLARED), **origin})


def choose_graph(owner: Resolved, graph: str | None) -> StageGraph:
    """The graph that `deploy` would take, with nothing else settled."""
    return _graph(owner, [*_default(owner), *_named_graph(graph)])[0]


def detected_device() -> str:
    """The device family of this machine."""
    from vllm_omni_platforms.detect import detect  # type: ignore[import-not-found,unused-ignore]

    try:
        return str(detect().device)
    except ValueError as error:
        raise SettingError(str(error), param="device") from None


def _probes() -> str:
    """What was looked at to find the device, and what was seen."""
    from vllm_omni_platforms.detect import detect  # type: ignore[import-not-found,unused-ignore]

    return "; ".join(f"{probe.source}: {probe.found}" for probe in detect().probes)


def takes_vllm(stage: Stage) -> bool:
    """Whether the stage's engine is vLLM, and so takes vLLM's own settings."""
    return bool(getattr(stage.spec, "takes_vllm", False))


def _default(owner: Resolved) -> list[Setting]:
    """The plugin's own recipe; a plugin may have none under the usual name."""
    path = owner.found.beside(owner.plugin.recipe)
    if path.is_file():
        return read_text(path.read_text(encoding="utf-8"), f"{owner.found.package}/{owner.plugin.recipe}")
    if owner.plugin.recipe == "default.yaml":
        return []
    raise PluginError(f"Plugin '{owner.found.name}' of {owner.found} is broken: its recipe {path} does not exist.")


def _named_graph(graph: str | None) -> list[Setting]:
    return [Setting(("graph",), graph, "--graph")] if graph is not None else []


def _graph(owner: Resolved, settings: Iterable[Setting]) -> tuple[StageGraph, str]:
    named = [setting for setting in settings if setting.path == ("graph",)]
    if not named:
        chosen: StageGraph = owner.found.use(owner.found.value, lambda plugin: plugin.graph_for(owner.config))
        return chosen, "checkpoint" if owner.plugin.choose and owner.config else DECLARED
    try:
        return owner.plugin.graph(_fixed(named[-1])), named[-1].source
    except PluginError as error:
        raise named[-1].wrong(error.message) from None


def _for_another_graph(setting: Setting, plugin: ModelPlugin, graph: StageGraph) -> bool:
    """A plugin has one default recipe for all its graphs: what it says of the others' parts is not for this one."""
    group, name = setting.path[0], setting.path[-1] if len(setting.path) < 2 else setting.path[1]
    return name not in _parts(graph).get(group, {name}) and any(name in _parts(other)[group] for other in plugin.graphs)


def _parts(graph: StageGraph) -> Mapping[str, Iterable[str]]:
    """The names that a recipe for this graph can use, by group."""
    return {"stages": [stage.name for stage in graph.stages], "edges": [edge.name for edge in graph.edges], "defaults": graph.params}


def _for_main(graph: StageGraph, flags: Mapping[str, str]) -> Iterator[Setting]:
    for name, text in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if graph.main is None or not takes_vllm(graph.main):
            raise SettingError(f"There is no flag {flag}, and no stage of graph '{graph.name}' takes vLLM's.", param=flag)
        path = ["stages", graph.main.name, "vllm", *name.replace("-", "_").split(".")]
        yield from read_value(path, text, flag)


def _checked(setting: Setting, graph: StageGraph, device: str) -> Any:
    """The value of a setting as it will be used."""
    group, *rest = setting.path
    if group in _parts(graph) and rest[0] not in _parts(graph)[group]:
        what = {"stages": "stage", "edges": "edge", "defaults": "parameter"}[group]
        raise setting.wrong(f"graph '{graph.name}' has no {what} '{rest[0]}'.{did_you_mean(rest[0], _parts(graph)[group])}")
    match setting.path:
        case ("stages", name, "devices"):
            return _devices(setting, device)
        case ("stages", name, "args", arg):
            declared = {param.name: param for param in graph.stage(name).all_args}
            if arg not in declared:
                raise setting.wrong(f"stage '{name}' takes no argument '{arg}'.{did_you_mean(arg, declared) or ' It takes none.'}")
            return check(setting, declared[arg])
        case ("stages", name, "vllm", *_):
            if not takes_vllm(graph.stage(name)):
                raise setting.wrong(f"'{setting.key}' has no effect: stage '{name}' does not run on vLLM. Its own are under 'args'.")
            return setting.value
        case ("edges", _, "window"):
            return _bytes(setting)
        case ("defaults", name):
            return check(setting, graph.params[name])
        case ("machine", "device") if (wanted := _fixed(setting)) != device:
            raise setting.wrong(f"this recipe is for the device '{wanted}', but this machine's is '{device}' ({_probes()}).")
        case ("model",):
            return _model(setting)
        case ("vllm",):
            return _vllm(setting, graph)
        case ("tested", *_):
            return setting.value
        case _:
            return _fixed(setting)


def check(setting: Setting, param: Param) -> Any:
    """The value as the parameter's type. Raises SettingError that says where it was given."""
    spelt = param.type is str and setting.text is not None  # on the command line 1 may be a text
    try:
        return replace(param, name=setting.key).check(setting.text if spelt else setting.value)
    except RequestError as error:
        raise setting.wrong(error.message) from None


def _fixed(setting: Setting) -> Any:
    return check(setting, FIXED[setting.path[-1]])


def _devices(setting: Setting, device: str) -> tuple[int, ...]:
    numbers = setting.value
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise setting.wrong(f"'{setting.key}' must be a list of device numbers, for example [0], not {numbers!r}.")
    if len(set(numbers)) < len(numbers):
        raise setting.wrong(f"'{setting.key}' names a device twice: {numbers}.")
    try:
        platform(device).visible_devices_env(numbers)
    except OmniError as error:
        raise setting.wrong(f"'{setting.key}': {error.message}") from None
    return tuple(numbers)


def _bytes(setting: Setting) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(setting.value))
    if isinstance(setting.value, bool) or match is None or match[2] not in UNITS or not (size := int(float(match[1]) * UNITS[match[2]])):
        raise setting.wrong(f"'{setting.key}' must be a number of bytes such as {DEFAULT_WINDOW} or 32MiB, not {setting.value!r}.")
    return size


def _model(setting: Setting) -> Any:
    models = setting.value if isinstance(setting.value, list) else [setting.value]
    if not models or not all(isinstance(model, str) for model in models):
        raise setting.wrong(f"'model' must be the model's name, or a list of names, not {setting.value!r}.")
    return setting.value


def _vllm(setting: Setting, graph: StageGraph) -> str:
    """The range of vLLM versions a recipe is for, which must hold if a stage runs on vLLM."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        wanted = SpecifierSet(setting.value if isinstance(setting.value, str) else "?")
    except InvalidSpecifier:
        raise setting.wrong(f"'vllm' must be a range of versions such as '>=0.32,<0.33', not {setting.value!r}.") from None
    name, have = installed_vllm()
    if have and any(map(takes_vllm, graph.stages)) and not wanted.contains(have, prereleases=True):
        remedy = f"Install it with: pip install '{name}{wanted}'"
        raise setting.wrong(f"this recipe is for vLLM {wanted}, but {name} {have} is installed. {remedy}")
    return str(wanted)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *way, last = path
    for key in way:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[last] = value


def _placement(stage: Stage, block: Mapping[str, Any]) -> Placement:
    declared = {param.name: param.default for param in stage.all_args if param.default is not None}
    return Placement(block.get("devices", ()), block.get("replicas", 1), {**declared, **block.get("args", {})}, block.get("vllm", {}))


def _keys(recipe: Recipe) -> Iterator[str]:
    """The dotted names of all settings that a recipe has a value for without being told."""
    for name, placement in recipe.stages.items():
        yield f"stages.{name}.replicas"
        yield from (f"stages.{name}.args.{arg}" for arg in placement.args)
    for name in recipe.edges:
        yield from (f"edges.{name}.connector", f"edges.{name}.window")
    yield from (f"defaults.{name}" for name in recipe.defaults)
