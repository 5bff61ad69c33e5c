"""`python -m vllm_omni.testing.prove PLUGIN_DIR`: runs a plugin's tests and writes down, in its proof.json, what they prove.

A claim is proved when every test that carries it passed; a skipped test proves nothing. Maturity follows from the claims alone:
`production` has all of the contract's and those of `PRODUCTION`, `beta` all of the contract's, `experimental` fewer.
If any test fails, an earlier proof of the same version is removed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_omni.discovery import Found, installed, installed_vllm
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
    """A pytest plugin that notes how the tests of each claim ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if name := getattr(getattr(item, "function", None), "claim", None):
            self.outcomes.setdefault(name, set()).add("xfailed" if hasattr(report, "wasxfail") else report.outcome)
        return report

    def proved(self) -> list[str]:
        return sorted(name for name, outcomes in self.outcomes.items() if outcomes == {"passed"})


def prove(folder: Path) -> Path | None:
    """Runs the tests of the plugin in `folder`; the proof's path, or None if a test failed. Raises SettingError if it is not installed."""
    plugin = installed_in(folder)
    proof = folder / "proof.json"
    witness = Witness()
    if pytest.main([str(folder / "tests"), "-q", "-p", "no:cacheprovider"], plugins=[witness]) != pytest.ExitCode.OK:
        proof.unlink(missing_ok=True)
        return None
    claims = witness.proved()
    found = {"version": plugin.version, "vllm": installed_vllm()[1], "claims": claims, "maturity": maturity(claims)}
    proof.write_text(json.dumps({**found, "date": datetime.now(UTC).date().isoformat()}, indent=1) + "\n", encoding="utf-8")
    print(f"{proof}: {plugin} is {found['maturity']}, with {len(claims)} claims: {', '.join(claims)}.")
    return proof


def installed_in(folder: Path) -> Found:
    """The plugin whose installed code is this folder's: that is what its tests will import."""
    for found in installed():
        spec = find_spec(found.package)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == folder.resolve():
            return found
    raise SettingError(f"{folder} is no plugin folder that is installed. Install it: pip install -e '{folder}'", param="folder")


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
