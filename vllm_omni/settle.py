"""MODEL and all that was said about it, settled into a Deployment: every value final, checked, and with the layer it came from.

One precedence: command line, then `--recipe`, then the plugin's default recipe, then what the declarations say. Starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from vllm_omni.deployment import Deployment
from vllm_omni.discovery import installed_vllm
from vllm_omni.errors import OmniError, PluginError, SettingError, did_you_mean
from vllm_omni.graph import StageGraph
from vllm_omni.layers import Setting, flat, read_assignment, read_recipe, read_text, read_value
from vllm_omni.machine import detected
from vllm_omni.param import Param
from vllm_omni.platform import platform
from vllm_omni.plugin import ModelPlugin
from vllm_omni.recipe import DEFAULT_WINDOW, Link, Placement, Recipe
from vllm_omni.resolve import Resolved, resolve

DECLARED = "declared"
OFFLOAD = "--enable-layerwise-offload"
PARALLEL = re.compile("--(.*-parallel-size|(ulysses|ring)-degree)")
"""Flags that servers of diffusion models have."""
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
    said += read_value(["graph"], graph, "--graph") if graph is not None else []
    owner = resolve(model, plugin=plugin, revision=revision, token=token)
    default = _default(owner)
    chosen, source = _graph(owner, [*default, *said])
    default = [setting for setting in default if not _for_another_graph(setting, owner.plugin, chosen)]
    settled = settle(chosen, [*default, *said, *_for_main(chosen, flags or {})], {"graph": source})
    on_vllm = next((stage for stage in chosen.stages if stage.spec.takes_vllm), None)
    if weights and on_vllm is not None:
        from vllm_omni import doctor

        doctor.require_vllm(f"Stage '{on_vllm.name}'")
    return Deployment(
        model=model, served_name=served_name or model, plugin=owner.plugin, package=owner.found.package, graph=chosen,
        folder=owner.folder() if weights else "", recipe=settled,
    )  # fmt: skip


def settle(graph: StageGraph, settings: Iterable[Setting], sources: Mapping[str, str]) -> Recipe:
    """The recipe that these settings, later ones first, and the declarations give. Raises SettingError that names source and key."""
    tree: dict[str, Any] = {}
    origin = {**sources, "machine.device": "detected"}
    for setting in (*_declared(graph), *settings):
        _put(tree, setting.path, checked(setting, graph))
        origin[setting.key] = setting.source
    stages = {stage.name: Placement(**tree["stages"][stage.name]) for stage in graph.stages}
    count = tree.get("machine", {}).get("count")
    for name, placement in stages.items():
        last = max(placement.devices, default=0)
        if count is not None and last >= count:
            key = f"stages.{name}.devices"
            message = f"{origin[key]}: '{key}' names device {last}, but of 'machine.count' {count} the last is {count - 1}."
            raise SettingError(message, param=key)
    edges = {edge.name: Link(**tree["edges"][edge.name]) for edge in graph.edges}
    return Recipe(graph.name, detected().device, stages, edges, tree.get("defaults", {}), origin)


def _default(owner: Resolved) -> list[Setting]:
    """The plugin's own recipe, if it has one."""
    path = owner.found.beside("default.yaml")
    return read_text(path.read_text(encoding="utf-8"), f"{owner.found.package}/{path.name}") if path.is_file() else []


def _graph(owner: Resolved, settings: Iterable[Setting]) -> tuple[StageGraph, str]:
    named = [setting for setting in settings if setting.path == ("graph",)]
    if not named:
        chosen: StageGraph = owner.found.use(owner.found.value, lambda plugin: plugin.graph_for(owner.config))
        return chosen, "checkpoint" if owner.plugin.choose and owner.config else DECLARED
    try:
        return owner.plugin.graph(named[-1].value), named[-1].source
    except PluginError as error:
        raise named[-1].wrong(error.message) from None


def _declared(graph: StageGraph) -> Iterator[Setting]:
    """What holds where nobody says otherwise."""
    document = {
        "stages": {stage.name: {"replicas": 1, "args": _defaults(stage.all_args)} for stage in graph.stages},
        "edges": {edge.name: asdict(Link()) for edge in graph.edges},
        "defaults": _defaults(graph.params.values()),
    }
    return flat(document, DECLARED)


def _defaults(params: Iterable[Param]) -> dict[str, Any]:
    return {param.name: param.default for param in params if param.default is not None}


def _for_another_graph(setting: Setting, plugin: ModelPlugin, graph: StageGraph) -> bool:
    """A plugin has one default recipe for all its graphs: what it says of the others' parts is not for this one."""
    group, name = setting.path[0], setting.path[-1] if len(setting.path) < 2 else setting.path[1]
    return name not in _parts(graph).get(group, {name}) and any(name in _parts(other)[group] for other in plugin.graphs)


def _parts(graph: StageGraph) -> Mapping[str, Iterable[str]]:
    """The names that a recipe for this graph can use, by group."""
    return {"stages": [stage.name for stage in graph.stages], "edges": [edge.name for edge in graph.edges], "defaults": graph.params}


def _for_main(graph: StageGraph, flags: Mapping[str, str]) -> Iterator[Setting]:
    offloads = graph.main is not None and any(arg.name == "offload" for arg in graph.main.all_args)
    for name, text in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if graph.main is not None and offloads and flag == OFFLOAD:
            yield from read_value(["stages", graph.main.name, "args", "offload"], "layers" if text == "true" else "none", flag)
            continue
        if graph.main is None or not graph.main.spec.takes_vllm:
            if PARALLEL.fullmatch(flag) and text == "1":
                continue  # as it is
            why = " They run on one device each: leave it out, or say 1." if PARALLEL.fullmatch(flag) else ""
            raise SettingError(f"There is no flag {flag}, and no stage of graph '{graph.name}' takes vLLM's.{why}", param=flag)
        path = ["stages", graph.main.name, "vllm", *name.replace("-", "_").split(".")]
        yield from read_value(path, text, flag)


def checked(setting: Setting, graph: StageGraph) -> Any:
    """The value of a setting as it will be used. Raises SettingError if this graph or this machine has no use for it."""
    group, *rest = setting.path
    if group in _parts(graph) and rest[0] not in _parts(graph)[group]:
        what = {"stages": "stage", "edges": "edge", "defaults": "parameter"}[group]
        raise setting.wrong(f"graph '{graph.name}' has no {what} '{rest[0]}'.{did_you_mean(rest[0], _parts(graph)[group])}")
    match setting.path:
        case ("stages", _, "devices"):
            return _devices(setting)
        case ("stages", name, "args", arg):
            declared = {param.name: param for param in graph.stage(name).all_args}
            if arg not in declared:
                raise setting.wrong(f"stage '{name}' takes no argument '{arg}'.{did_you_mean(arg, declared) or ' It takes none.'}")
            return setting.checked(declared[arg])
        case ("stages", name, "vllm", *_) if not graph.stage(name).spec.takes_vllm:
            raise setting.wrong(f"'{setting.key}' has no effect: stage '{name}' does not run on vLLM. Its own are under 'args'.")
        case ("edges", _, "window"):
            return _bytes(setting)
        case ("defaults", name):
            return setting.checked(graph.params[name])
        case ("machine", "device") if (device := detected()).device != setting.value:
            seen = "; ".join(f"{probe.source}: {probe.found}" for probe in device.probes)
            raise setting.wrong(f"this recipe is for the device '{setting.value}', but this machine's is '{device.device}' ({seen}).")
        case ("model",):
            return _model(setting)
        case ("vllm",):
            return _vllm(setting, graph)
    return setting.value


def _devices(setting: Setting) -> tuple[int, ...]:
    numbers = setting.value
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise setting.wrong(f"'{setting.key}' must be a list of device numbers, for example [0], not {numbers!r}.")
    if len(set(numbers)) < len(numbers):
        raise setting.wrong(f"'{setting.key}' names a device twice: {numbers}.")
    try:
        platform(detected().device).visible_devices_env(numbers)
    except OmniError as error:
        raise setting.wrong(f"'{setting.key}': {error.message}") from None
    return tuple(numbers)


def _bytes(setting: Setting) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(setting.value))
    size = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if not size:
        raise setting.wrong(f"'{setting.key}' must be a number of bytes such as {DEFAULT_WINDOW} or 32MiB, not {setting.value!r}.")
    return size


def _model(setting: Setting) -> Any:
    models = setting.value if isinstance(setting.value, list) else [setting.value]
    if not models or not all(isinstance(model, str) for model in models):
        raise setting.wrong(f"'model' must be the model's name, or a list of names, not {setting.value!r}.")
    return setting.value


def _vllm(setting: Setting, graph: StageGraph) -> str:
    """The range of vLLM versions a recipe is for, which must hold if a stage runs on vLLM."""
    try:
        wanted = SpecifierSet(setting.value if isinstance(setting.value, str) else "?")
    except InvalidSpecifier:
        raise setting.wrong(f"'vllm' must be a range of versions such as '>=0.32,<0.33', not {setting.value!r}.") from None
    name, have = installed_vllm()
    if have and any(stage.spec.takes_vllm for stage in graph.stages) and not wanted.contains(have, prereleases=True):
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
