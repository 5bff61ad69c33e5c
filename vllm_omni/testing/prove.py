"""`python -m vllm_omni.testing.prove PLUGIN_DIR`: runs a plugin's tests and writes down, in its proof.json, what they prove.

A claim is proved when every test that carries it passed; a skipped test proves nothing. Maturity follows from the claims alone:
`production` has all of the contract's and those of `PRODUCTION`, `beta` all of the contract's, `experimental` fewer.
If any test fails, an earlier proof of the same version is removed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from importlib_metadata import PackageNotFoundError, version

from vllm_omni.discovery import installed_vllm
from vllm_omni.errors import OmniError, SettingError
from vllm_omni.testing.contract import PluginContract

PRODUCTION = frozenset({"figures", "parity"})
"""Beyond the contract: the recipe's figures were measured on its machine, and numbers agree with the reference implementation."""


def contract_claims() -> frozenset[str]:
    """What the contract suite proves of a plugin that passes it."""
    return frozenset(test.claim for test in vars(PluginContract).values() if hasattr(test, "claim"))


def maturity(claims: Iterable[str]) -> str:
    """What these claims earn."""
    missing = (contract_claims() | PRODUCTION) - set(claims)
    if missing & contract_claims():
        return "experimental"
    return "beta" if missing else "production"


class Witness:
    """A pytest plugin that notes which claim each test carries and which of them passed."""

    def __init__(self) -> None:
        self.claims: dict[str, str] = {}
        self.outcomes: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if name := getattr(getattr(item, "function", None), "claim", None):
                self.claims[item.nodeid] = name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if name := self.claims.get(report.nodeid):
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.outcomes.setdefault(name, set()).add(outcome)

    def proved(self) -> list[str]:
        return sorted(name for name, outcomes in self.outcomes.items() if outcomes == {"passed"})


def prove(folder: Path) -> Path | None:
    """Runs the tests of the plugin in `folder`; the proof's path, or None if a test failed. Raises SettingError if it is not installed."""
    project, module = _project(folder)
    proof = folder / "proof.json"
    witness = Witness()
    if pytest.main([str(folder / "tests"), "-q", "-p", "no:cacheprovider"], plugins=[witness]) != pytest.ExitCode.OK:
        proof.unlink(missing_ok=True)
        return None
    claims = witness.proved()
    found = {"version": project["version"], "vllm": installed_vllm()[1], "claims": claims, "maturity": maturity(claims)}
    proof.write_text(json.dumps({**found, "date": datetime.now(UTC).date().isoformat()}, indent=1) + "\n", encoding="utf-8")
    print(f"{proof}: {module} {project['version']} is {found['maturity']}, with {len(claims)} claims: {', '.join(claims)}.")
    return proof


def _project(folder: Path) -> tuple[dict[str, str], str]:
    """Name and version in its pyproject.toml, and its module: what is installed must be this folder, or other code would be tested."""
    try:
        whole = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        project, (module,) = whole["project"], whole["tool"]["setuptools"]["package-dir"]
    except (OSError, tomllib.TOMLDecodeError, KeyError, ValueError) as error:
        raise SettingError(f"{folder} is no plugin folder: its pyproject.toml cannot be used ({type(error).__name__}: {error}).") from error
    repair = f"Install this folder: pip install -e '{folder}'"
    try:
        have = version(project["name"])
    except PackageNotFoundError as error:
        raise SettingError(f"{project['name']} is not installed. {repair}") from error
    spec = find_spec(module)
    if have != project["version"] or spec is None or spec.origin is None or Path(spec.origin).resolve().parent != folder.resolve():
        raise SettingError(f"The {project['name']} {have} that is installed is another than {folder}. {repair}")
    return project, module


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_omni.testing.prove", description="run a plugin's tests and write its proof.json")
    parser.add_argument("folder", type=Path, metavar="PLUGIN_DIR")
    try:
        return 0 if prove(parser.parse_args().folder) else 1
    except OmniError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
