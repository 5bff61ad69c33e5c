"""What repairs an environment, step by step: as a command to read, as a plan that names every change, done, and undone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from importlib_metadata import distributions
from packaging.utils import canonicalize_name

from vllm_omni.errors import SettingError
from vllm_omni.machine import source

UNDO = "vllm-omni-undo"
"""What the file begins with, in the environment's own folder, that undoes a repair."""


@dataclass(frozen=True, slots=True)
class Install:
    """Requirements to install, with what they need unless `alone`; with `again`, also those that are there. `options` are the installer's.

    `variables` are set for it. `undo` is a command for what no version tells.
    """

    requirements: tuple[str, ...]
    alone: bool = False
    again: bool = False
    options: tuple[str, ...] = ()
    undo: str = ""
    variables: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        again = ["--reinstall" if installer().uv else "--force-reinstall"] if self.again else []
        return ["install", *again, *(["--no-deps"] if self.alone else []), *self.options, *self.requirements]

    @property
    def command(self) -> str:
        return " ".join([*self.variables, installer().command(self.words)])

    @property
    def full(self) -> str:
        return " ".join([*self.variables, installer().full(self.words)])


@dataclass(frozen=True, slots=True)
class Remove:
    """Distributions to uninstall."""

    names: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return ["uninstall", *([] if installer().uv else ["--yes"]), *self.names]

    @property
    def command(self) -> str:
        return installer().command(self.words)


@dataclass(frozen=True, slots=True)
class Move:
    """A file or folder that is in the way."""

    path: Path

    @property
    def aside(self) -> Path:
        names = (f"{self.path.name}.other{number}" for number in ("", *range(2, 1000)))
        return next(path for path in map(self.path.with_name, names) if not path.exists())

    @property
    def command(self) -> str:
        return shlex.join(["mv", str(self.path), str(self.aside)])


Step = Install | Remove | Move
Repair = tuple[Step, ...]


class Installer(NamedTuple):
    """pip or uv, for the environment of this process: the words that its commands begin with, and the options they end with."""

    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    uv: bool = False

    def command(self, words: Iterable[str]) -> str:
        """For a shell that is in this environment if that has a `pip`, else for any."""
        begin = ("pip",) if self.begin[0] == sys.executable and _on_the_path("pip") else self.begin
        return shlex.join([*begin, *words, *self.end])

    def full(self, words: Iterable[str]) -> str:
        """For any shell."""
        return shlex.join([*self.begin, *words, *self.end])

    def run(self, words: Sequence[str], *flags: str, variables: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
        """Raises SettingError with the error that it told if it fails."""
        environ = {**os.environ, **dict(each.split("=", 1) for each in variables)}
        done = subprocess.run(
            [*self.begin, *words, *flags, *self.end], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environ
        )
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            errors = [line for line in told if re.match(r"\W*error", line, re.IGNORECASE)]
            raise SettingError(f"{self.command(words)}: {(errors or told)[0].strip()}")
        return done


@cache
def installer() -> Installer:
    """pip, if this environment has it, else uv. Without both, the command is still pip's."""
    if find_spec("pip") is None and (uv := shutil.which("uv")):
        return Installer((uv, "pip"), ("--python", sys.executable, "--color", "never"), uv=True)
    return Installer((sys.executable, "-m", "pip"))


def _on_the_path(program: str) -> bool:
    found = shutil.which(program)
    return found is not None and Path(found).parent == Path(sysconfig.get_path("scripts"))


@dataclass(frozen=True, slots=True)
class Change:
    """What a step does to one distribution, by version ("": not installed), or to a file. `exact` installs just this."""

    name: str
    before: str
    after: str
    exact: str = ""

    def __str__(self) -> str:
        if self.before and self.before == self.after:
            return f"{self.name} {self.before}: again"
        return f"{self.name} {self.before or '(not installed)'} -> {self.after or '(removed)'}"


def versions() -> dict[str, str]:
    """Every installed distribution by normalised name; of two, the first on the path."""
    found: dict[str, str] = {}
    for dist in distributions():
        if (dist.read_text("METADATA") or dist.read_text("PKG-INFO")) and dist.metadata["Name"]:  # a half-removed one has neither
            found.setdefault(canonicalize_name(dist.name), dist.version)
    return found


def plan(step: Step) -> list[Change]:
    """All that the step would change. Raises SettingError if it cannot be done."""
    have = versions()
    match step:
        case Move(path):
            return [Change(str(path), "there", str(step.aside))]
        case Remove(names):
            return [Change(name, have.get(canonicalize_name(name), ""), "") for name in names]
    if installer().uv:
        told = installer().run(step.words, "--dry-run", variables=step.variables).stderr
        lines = re.findall(r"^ [+~] ([\w.-]+)(?:==(\S+)| @ (\S+))", told, re.MULTILINE)
        wanted = [(name, version or have.get(canonicalize_name(name), url), url) for name, version, url in lines]
    else:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            installer().run(step.words, "--dry-run", "--report", file.name, variables=step.variables)
            report = json.loads(file.read())
        wanted = [(each["metadata"]["name"], each["metadata"]["version"], _url(each)) for each in report["install"]]
    if not wanted:
        raise SettingError(f"{step.command} would change nothing")
    return [_change(step, name, have.get(canonicalize_name(name), ""), version, url) for name, version, url in wanted]


def _url(reported: dict[str, Any]) -> str:
    return str(reported["download_info"]["url"]) if reported.get("is_direct") else ""


def _change(step: Install, name: str, before: str, after: str, url: str) -> Change:
    """A requirement that is a folder or a file is installed as it was written."""
    return Change(name, before, after, "" if url and any("/" in word for word in step.requirements) else f"{name}=={after}")


@dataclass(slots=True)
class Repairs:
    """Repairs that were planned, in one environment."""

    planned: list[tuple[Step, list[Change]]] = field(default_factory=list)
    undo: list[str] = field(default_factory=list)
    """What undoes what was done so far, last thing first."""
    script: Path = Path()

    def add(self, repair: Repair) -> list[Change]:
        """Plan its steps. Raises SettingError, and adds nothing, if one of them cannot be done, or not before others have been."""
        steps = [(step, plan(step)) for step in repair]
        if "torch" in self.names or self.names & _names(steps):
            raise SettingError("it depends on what is changed above; do this again afterwards")
        self.planned += steps
        return [change for _, changes in steps for change in changes]

    @property
    def names(self) -> set[str]:
        """What would be changed."""
        return _names(self.planned)

    def do(self) -> list[str]:
        """Do what was planned, and say what else changed: that would be nothing.

        Raises SettingError at the first step that fails. What was done is told by `undo`, and by the script at `script`, in any case: it is
        written before anything is changed, as if all were done, and once more at the end.
        """
        before = {name: (version, source(name)) for name, version in versions().items()}
        planned = sorted(self.planned, key=lambda each: not isinstance(each[0], Move))  # or what is installed would be moved
        moves = [shlex.join(["mv", str(step.aside), str(step.path)]) for step, _ in planned if isinstance(step, Move)]
        back = [step.undo for step, _ in planned if isinstance(step, Install) and step.undo]
        options = [word for step, _ in planned if isinstance(step, Install) for word in step.options]
        changed = self.names & before.keys()
        self.script = self._script()
        self._write([*_back({name: before[name][1] for name in changed}, sorted(self.names - before.keys()), options), *moves, *back])
        try:
            for step, changes in planned:
                _do(step, changes)
        finally:
            after = versions()
            gone = {name: told for name, (version, told) in before.items() if after.get(name) != version}
            new = sorted(after.keys() - before.keys())
            self._write([*_back(gone, new, options), *moves, *back])
            if not self.undo:
                self.script.unlink()
        return sorted({*gone, *new} - self.names)

    def _write(self, undo: list[str]) -> None:
        self.undo = undo
        told = "# Undoes what `vllm-omni doctor --fix` did. Packages come from where the installer is configured to look."
        lines = [f"{{ {command}; }} || failed=1" for command in undo]
        self.script.write_text("\n".join(["#!/bin/sh", told, *lines, "exit ${failed:-0}", ""]), encoding="utf-8")

    def _script(self) -> Path:
        """A new file. Before anything is changed: where it cannot be written, nothing should be."""
        stem, wrong = f"{UNDO}-{datetime.now():%Y%m%d-%H%M%S}", None
        for folder in (sys.prefix, tempfile.gettempdir()):
            names = (f"{stem}{number}.sh" for number in ("", *(f"-{number}" for number in range(2, 100))))
            path = next(path for path in map(Path(folder).joinpath, names) if not path.exists())
            try:
                path.touch()
                return path
            except OSError as error:
                wrong = error
        raise SettingError(f"What undoes it could not be written, so nothing was changed: {wrong}")


def _do(step: Step, changes: list[Change]) -> None:
    match step:
        case Move(path):
            try:
                path.rename(step.aside)
            except OSError as error:
                raise SettingError(f"{step.command}: {error}") from None
        case Remove():
            installer().run(step.words)
        case Install(requirements, options=options, variables=variables):
            exact = tuple(change.exact for change in changes) if all(change.exact for change in changes) else requirements
            installer().run(Install(exact, alone=True, again=True, options=options).words, variables=variables)


def _names(planned: Iterable[tuple[Step, list[Change]]]) -> set[str]:
    return {canonicalize_name(change.name) for step, changes in planned if not isinstance(step, Move) for change in changes}


def _back(gone: dict[str, tuple[str, ...]], new: list[str], options: Sequence[str]) -> Iterable[str]:
    """Commands that bring distributions back, and remove new ones. First those: what comes back may have files of the same names.

    What is of no public index may be of the one that the repair came from, if that can be reached.
    """
    if new:
        yield installer().full(Remove(tuple(new)).words)
    if gone:
        install = Install(tuple(word for told in gone.values() for word in told), alone=True, again=True)
        urls = [word for word in options if "://" in word]
        more = tuple(word for url in dict.fromkeys(urls) for word in ("--extra-index-url", url))
        yield f"{replace(install, options=more).full} || {install.full}" if more else install.full
