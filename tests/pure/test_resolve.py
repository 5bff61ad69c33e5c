"""Which plugin owns a model: what the user said, then what the checkpoint says, then who claims it; never a guess."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import packaging.requirements
import pytest
from tiny import checkpoint, distribution, forget

from vllm_omni.errors import NotFoundError, OmniError, PluginError, SettingError
from vllm_omni.resolve import resolve

assert packaging.requirements  # imported while the whole path is there


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is all of the path, as far as installed distributions go; the current folder is another one."""
    for name in ("site", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "site"
    forget(tmp_path)


def test_a_folder_names_its_owner_by_model_type(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    distribution(site, "tiny-two", models=["two"])
    folder = checkpoint(Path("model"), config={"model_type": "two", "needs": "text_only"})
    owner = resolve("model")
    assert owner.found.distribution == "tiny-two"
    assert owner.config["needs"] == "text_only"
    assert owner.folder() == str(folder)


def test_a_folder_names_its_owner_by_class_name(site: Path) -> None:
    distribution(site, "tiny-one", models=["TinyOne"])
    checkpoint(Path("model"), config={"model_type": "unknown"}, model_index={"_class_name": "TinyOne", "needs": "text_only"})
    assert resolve("model").config == {"_class_name": "TinyOne", "needs": "text_only"}


def test_an_alias_needs_no_checkpoint_and_comes_before_a_folder(site: Path) -> None:
    distribution(site, "tiny-one", aliases=["uno"])
    checkpoint(Path("uno"), config={"model_type": "other"})
    owner = resolve("uno")
    assert (owner.folder(), owner.config) == ("", {})
    with pytest.raises(NotFoundError, match="its model_type is 'other'"):
        resolve("./uno")


@pytest.mark.parametrize("name", ["two", "zwei", "tiny-two"])
def test_the_named_plugin_comes_before_what_the_checkpoint_says(site: Path, name: str) -> None:
    distribution(site, "tiny-one", models=["one"])
    distribution(site, "tiny-two", models=["two"], aliases=["zwei"])
    checkpoint(Path("model"), config={"model_type": "one"})
    owner = resolve("model", plugin=name)
    assert owner.found.distribution == "tiny-two"
    assert owner.config == {"model_type": "one"}


def test_a_plugin_that_is_not_installed_is_not_replaced(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    checkpoint(Path("model"), config={"model_type": "one"})
    with pytest.raises(NotFoundError, match=r"no plugin 'tiny-won'. Did you mean 'tiny-one'\?"):
        resolve("model", plugin="tiny-won")


def test_two_owners_are_an_error_that_the_named_plugin_ends(site: Path) -> None:
    distribution(site, "tiny-one", models=["same"])
    distribution(site, "tiny-two", models=["same"])
    checkpoint(Path("model"), config={"model_type": "same"})
    with pytest.raises(PluginError, match=r"'same' is claimed by (tiny-one 1\.0 and tiny-two 1\.0|tiny-two 1\.0 and tiny-one 1\.0)"):
        resolve("model")
    assert resolve("model", plugin="tiny-two").found.distribution == "tiny-two"


CLAIM = "def claims(files): return 'flow.pt' in files and files['flow.json'] == {'a': 1} and files['flow.pt'] is None\n"


def test_a_claim_owns_a_checkpoint_that_names_nothing(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"], claims={"one": "tiny_one.claims:claims"}, files={"claims.py": CLAIM})
    distribution(site, "tiny-two", models=["two"], claims={"two": "tiny_two.claims:claims"}, files={"claims.py": "1 / 0"})
    (checkpoint(Path("model"), flow={"a": 1}) / "flow.pt").touch()
    owner = resolve("model")
    assert (owner.found.distribution, owner.config) == ("tiny-one", {})


def test_two_claims_are_an_error(site: Path) -> None:
    for name in ("one", "two"):
        module = f"tiny_{name}.claims:claims"
        distribution(site, f"tiny-{name}", models=[name], claims={name: module}, files={"claims.py": "claims = len"})
    checkpoint(Path("model"), config={"model_type": "unknown"})
    with pytest.raises(PluginError, match="The checkpoint model is claimed by "):
        resolve("model")


def test_nobodys_checkpoint_is_told_with_what_is_installed(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"], aliases=["uno"])
    distribution(site, "tiny-two", models=["two"], claims={"two": "tiny_two.claims:claims"}, files={"claims.py": "1 / 0"})
    checkpoint(Path("model"), config={"model_type": "llm"}, model_index={"_class_name": "Pipe"})
    with pytest.raises(NotFoundError) as error:
        resolve("model")
    message = str(error.value)
    assert "its model_type is 'llm' and its _class_name is 'Pipe'" in message
    assert "Installed: one, uno, two" in message or "Installed: two, one, uno" in message
    assert "Plugin 'two' of tiny-two 1.0 is broken: ZeroDivisionError" in message


def test_only_the_owner_is_imported(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    distribution(site, "tiny-two", models=["two"], claims={"two": "tiny_two.plugin:PLUGIN"}, plugin="1 / 0")
    checkpoint(Path("model"), config={"model_type": "one"})
    assert resolve("model").plugin.name == "tiny"
    assert "tiny_two" not in sys.modules


@pytest.mark.parametrize("model", ["uno2", "uno11"])
def test_a_word_close_to_an_alias_is_not_looked_for_on_the_hub(site: Path, model: str) -> None:
    distribution(site, "tiny-one", aliases=["uno1"])
    with pytest.raises(NotFoundError, match=r"There is no model .*Did you mean 'uno1'\?"):
        resolve(model)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("./gone", "There is no folder './gone'"),
        ("/a/b/c", "There is no folder '/a/b/c'"),
        ("a/b/c", "There is no folder 'a/b/c'"),
        ("", "There is no folder ''"),
        ("weights.safetensors", "weights.safetensors is a file"),
    ],
)
def test_what_can_be_no_model_is_refused(site: Path, model: str, complaint: str) -> None:
    Path("weights.safetensors").touch()
    with pytest.raises(NotFoundError) as error:
        resolve(model)
    assert complaint in str(error.value)


@pytest.mark.parametrize(("flag", "option"), [("--revision", {"revision": "main"}), ("--hf-token", {"token": "secret"})])
@pytest.mark.parametrize("model", ["uno", "model"])
def test_what_would_have_no_effect_is_refused(site: Path, model: str, flag: str, option: dict[str, str]) -> None:
    distribution(site, "tiny-one", models=["one"], aliases=["uno"])
    checkpoint(Path("model"), config={"model_type": "one"})
    with pytest.raises(SettingError, match=f"{flag} has no effect") as error:
        resolve(model, **option)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "\xff"])
def test_a_damaged_configuration_is_named(site: Path, content: str) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(OmniError, match=r"config\.json of model is not JSON"):
        resolve("model")


@pytest.mark.parametrize("config", [[], "text", {"model_type": None}, {"model_type": ["one"]}, {}])
def test_an_odd_configuration_names_no_owner(site: Path, config: object) -> None:
    distribution(site, "tiny-one", models=["one"])
    checkpoint(Path("model"), config=config)
    with pytest.raises(NotFoundError, match="No installed plugin owns model"):
        resolve("model")
