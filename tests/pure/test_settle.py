"""Every value of a recipe is final, checked, and knows its layer; what nobody would use is refused by file and key."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import PLUGIN, VLLM, checkpoint, distribution, forget

from vllm_omni.deployment import Deployment
from vllm_omni.errors import NotFoundError, OmniError, PluginError, SettingError
from vllm_omni.recipe import DEFAULT_WINDOW, Link
from vllm_omni.settle import deploy

DEFAULT = """
graph: full
stages:
  talker: {args: {rate: 8000}}
  singer: {replicas: 3}
edges: {"talker->singer": {window: 1MiB}}
defaults: {voice: high}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, on a machine that has a CPU only; the current folder is another one."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "cpu")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "site"
    forget(tmp_path)


@pytest.fixture
def tiny(site: Path) -> str:
    distribution(site, "tiny-one", models=["one"], aliases=["uno"], files={"default.yaml": DEFAULT})
    return "uno"


@pytest.fixture
def spoken(site: Path) -> str:
    distribution(site, "tiny-spoken", aliases=["dos"], plugin=VLLM)
    return "dos"


def recipe(text: str, name: str = "my.yaml") -> str:
    Path(name).write_text(text)
    return name


def refused(model: str, error: type[OmniError] = SettingError, **said: Any) -> str:
    with pytest.raises(error) as caught:
        deploy(model, **said)
    return str(caught.value)


def value(deployment: Deployment, key: str) -> tuple[Any, str]:
    """A value of the recipe, and where it came from."""
    group, name, *rest = key.split(".")
    found: Any = getattr(deployment.recipe, group)[name]
    for part in rest:
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found, deployment.recipe.sources[key]


# ---- precedence


def test_without_a_word_the_declarations_hold(site: Path) -> None:
    distribution(site, "tiny-one", aliases=["uno"])
    deployment = deploy("uno")
    assert (deployment.model, deployment.served_name, deployment.package, deployment.folder) == ("uno", "uno", "tiny_one", "")
    assert deployment.recipe.graph == deployment.graph.name == "full"
    assert deployment.recipe.device == "cpu"
    assert deployment.recipe.stages["talker"].args == {"max_batch": 8, "rate": 16_000}
    assert deployment.recipe.stages["singer"].args == {"max_batch": 4}
    assert deployment.recipe.stages["singer"].replicas == 1
    assert deployment.recipe.edges == {"talker->singer": Link("auto", DEFAULT_WINDOW)}
    assert deployment.recipe.defaults == {"voice": "low", "speed": 1.0}
    told = {"graph", "machine.device", "stages.talker.replicas", "stages.singer.replicas", "stages.talker.args.rate"}
    told |= {"stages.talker.args.max_batch", "stages.singer.args.max_batch", "defaults.voice", "defaults.speed"}
    told |= {"edges.talker->singer.window", "edges.talker->singer.connector"}
    assert deployment.recipe.sources == {**dict.fromkeys(told, "declared"), "machine.device": "detected"}


@pytest.mark.parametrize(
    ("key", "default", "in_file", "on_line"),
    [
        ("stages.talker.args.rate", 8_000, 24_000, 48_000),
        ("stages.singer.replicas", 3, 5, 7),
        ("defaults.voice", "high", "low", "high"),
        ("edges.talker->singer.window", 1 << 20, 2 << 20, 3 << 20),
    ],
)
def test_the_command_line_wins_then_the_recipe_then_the_default(tiny: str, key: str, default: Any, in_file: Any, on_line: Any) -> None:
    group, name, *rest = key.split(".")
    document: Any = in_file
    for part in reversed([group, name, *rest]):
        document = {part: document}
    file = recipe(str(document))
    assert value(deploy(tiny), key) == (default, "tiny_one/default.yaml")
    assert value(deploy(tiny, recipe=file), key) == (in_file, "my.yaml")
    assert value(deploy(tiny, recipe=file, settings=[f"{key}={in_file}", f"{key}={on_line}"]), key) == (on_line, "--set")


def test_layers_do_not_erase_what_they_do_not_name(tiny: str) -> None:
    deployment = deploy(tiny, recipe=recipe("stages: {talker: {args: {label: x}}}"), settings=["talker.replicas=2"])
    assert deployment.recipe.stages["talker"].args == {"max_batch": 8, "rate": 8_000, "label": "x"}
    assert deployment.recipe.stages["talker"].replicas == 2
    assert deployment.recipe.stages["singer"].replicas == 3


def test_the_graph_is_chosen_by_the_same_rule(tiny: str) -> None:
    file = recipe("graph: text_only")
    assert value_of_graph(deploy(tiny)) == ("full", "tiny_one/default.yaml")
    assert value_of_graph(deploy(tiny, recipe=file)) == ("text_only", "my.yaml")
    assert value_of_graph(deploy(tiny, recipe=file, settings=["graph=full"])) == ("full", "--set")
    assert value_of_graph(deploy(tiny, recipe=recipe("graph: full"), graph="text_only")) == ("text_only", "--graph")


def test_the_checkpoint_chooses_the_graph_when_nobody_else_does(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    checkpoint(Path("model"), config={"model_type": "one", "needs": "text_only"})
    assert value_of_graph(deploy("model")) == ("text_only", "checkpoint")
    assert value_of_graph(deploy("model", graph="full")) == ("full", "--graph")


def value_of_graph(deployment: Deployment) -> tuple[str, str]:
    assert deployment.graph.name == deployment.recipe.graph
    return deployment.recipe.graph, deployment.recipe.sources["graph"]


def test_a_default_recipe_serves_all_graphs_of_its_plugin(tiny: str) -> None:
    deployment = deploy(tiny, graph="text_only")
    assert list(deployment.recipe.stages) == ["talker"]
    assert deployment.recipe.stages["talker"].args["rate"] == 8_000
    assert "graph 'text_only' has no stage 'singer'" in refused(tiny, graph="text_only", recipe=recipe("stages: {singer: {replicas: 2}}"))


def test_a_plugin_that_cannot_choose_is_named(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"], plugin=PLUGIN.replace('config.get("needs", "full")', 'config["needs"]'))
    checkpoint(Path("model"), config={"model_type": "one"})
    assert refused("model", PluginError).startswith("Plugin 'one' of tiny-one 1.0 is broken: KeyError: 'needs'")


def test_weights_come_last(site: Path) -> None:
    distribution(site, "tiny-one", models=["one"])
    folder = checkpoint(Path("model"), config={"model_type": "one"})
    assert deploy("model", served_name="mine").folder == str(folder)
    assert deploy("model", served_name="mine").served_name == "mine"
    assert deploy("model", weights=False).folder == ""


# ---- values


@pytest.mark.parametrize(
    ("setting", "key", "expected"),
    [
        ("talker.args.label=1", "stages.talker.args.label", "1"),
        ("talker.args.label=yes", "stages.talker.args.label", "yes"),
        ("talker.args.label=a: [b", "stages.talker.args.label", "a: [b"),
        ("talker.args={label: yes please, rate: 1}", "stages.talker.args.label", "yes please"),
        ("talker.args.table={a: [1, 2]}", "stages.talker.args.table", {"a": [1, 2]}),
        ("stages.talker.args.rate=7", "stages.talker.args.rate", 7),
        ("defaults.speed=1e3", "defaults.speed", 1000.0),
        ("defaults.speed=2", "defaults.speed", 2.0),
        ("defaults={speed: 3}", "defaults.speed", 3.0),
        ("defaults.seed=-1", "defaults.seed", -1),
        ("edges.talker->singer.window=32MiB", "edges.talker->singer.window", 32 << 20),
        ("edges.talker->singer.window=1.5 kB", "edges.talker->singer.window", 1500),
        ("edges.talker->singer.window=12", "edges.talker->singer.window", 12),
        ("edges.talker->singer.connector=shm", "edges.talker->singer.connector", "shm"),
    ],
)
def test_a_setting_of_the_command_line_is_read_as_yaml(tiny: str, setting: str, key: str, expected: Any) -> None:
    assert value(deploy(tiny, settings=[setting]), key) == (expected, "--set")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("talker.replicas", "--set talker.replicas: write it as KEY=VALUE"),
        ("=1", "--set =1: write it as KEY=VALUE"),
        ("talker..x=1", "write it as KEY=VALUE"),
        ("speed=2", "--set speed=2: there is no setting 'speed'. Known: "),
        ("speed=2", "A request's default is set as defaults.speed."),
        ("default.speed=2", "there is no setting 'default'. Did you mean 'defaults'?"),
        ("tlaker.replicas=2", "--set: graph 'full' has no stage 'tlaker'. Did you mean 'talker'?"),
        ("talker.replicsa=2", "--set: there is no setting 'replicsa' in 'stages.talker'. Did you mean 'replicas'?"),
        ("talker.replicas.x=2", "--set: there is no setting 'x' in 'stages.talker.replicas'."),
        ("talker=2", "there is no setting 'talker'."),
        ("stages.talker=2", "--set: 'stages.talker' must be a mapping of devices, replicas, args, vllm, not 2."),
        ("talker.replicas=0", "--set: 'stages.talker.replicas' must be at least 1, not 0."),
        ("talker.replicas=two", "--set: 'stages.talker.replicas' must be of type int, not 'two'."),
        ("talker.replicas=true", "'stages.talker.replicas' must be of type int, not True."),
        ("talker.replicas=", "'stages.talker.replicas' must be of type int, not None."),
        ("talker.replicas=[1", "--set: 'stages.talker.replicas' must be of type int, not '[1'."),
        ("talker.args.rat=1", "--set: stage 'talker' takes no argument 'rat'. Did you mean 'rate'?"),
        ("talker.args.rate=fast", "--set: 'stages.talker.args.rate' must be of type int, not 'fast'."),
        ("defaults.voise=low", "--set: graph 'full' has no parameter 'voise'. Did you mean 'voice'?"),
        ("defaults.voice=deep", "--set: 'defaults.voice' must be one of low, high, not 'deep'."),
        ("defaults.speed=.nan", "'defaults.speed' must be a number"),
        ("defaults.speed=0.1", "'defaults.speed' must be at least 0.5"),
        ("edges.talker->sinker.window=1", "graph 'full' has no edge 'talker->sinker'. Did you mean 'talker->singer'?"),
        ("edges.talker->singer.window=0", "must be a number of bytes such as 33554432 or 32MiB, not 0."),
        ("edges.talker->singer.window=-1", "must be a number of bytes"),
        ("edges.talker->singer.window=3MIB", "not '3MIB'"),
        ("edges.talker->singer.window=true", "not True"),
        ("edges.talker->singer.connector=shmem", "'edges.talker->singer.connector' must be one of auto, inline, shm, not 'shmem'."),
        ("talker.devices=[0]", "--set: 'stages.talker.devices': The CPU has no device 0"),
        ("talker.devices=0", "--set: 'stages.talker.devices' must be a list of device numbers, for example [0], not 0."),
        ("talker.devices=[-1]", "must be a list of device numbers"),
        ("talker.devices=[true]", "must be a list of device numbers"),
        ("talker.devices=[1, 1]", "--set: 'stages.talker.devices' names a device twice: [1, 1]."),
        ("talker.vllm.dtype=half", "'stages.talker.vllm.dtype' has no effect: stage 'talker' does not run on vLLM."),
        ("talker.memory=60GiB", "there is no setting 'memory' in 'stages.talker'."),
        ("talker.tier=exact", "there is no setting 'tier' in 'stages.talker'."),
        ("graph=ful", "--set: Plugin 'tiny' has no graph 'ful'. Did you mean 'full'?"),
        ("machine.device=null", "--set: this recipe is for the device 'null', but"),
        ("machine.device=tpu", "this recipe is for the device 'tpu', but this machine's is 'cpu' (VLLM_OMNI_TARGET_DEVICE: is 'cpu'; "),
        ("machine.count=0", "'machine.count' must be at least 1"),
        ("model=[]", "'model' must be the model's name, or a list of names, not []"),
        ("vllm=>>1", "'vllm' must be a range of versions such as '>=0.32,<0.33', not '>>1'."),
        ("vllm=0.32", "'vllm' must be a range of versions"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_key(tiny: str, setting: str, complaint: str) -> None:
    assert complaint in refused(tiny, settings=[setting])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stage: {}", "my.yaml: there is no setting 'stage'. Did you mean 'stages'?"),
        ("stages: {talker: {memory: 60GiB}}", "my.yaml: there is no setting 'memory' in 'stages.talker'."),
        ("stages: {talker: {offload: none}}", "my.yaml: there is no setting 'offload' in 'stages.talker'."),
        ("stages: [talker]", "my.yaml: 'stages' must be a mapping of names to values, not ['talker']."),
        ("- a\n- b", "my.yaml: the file must be a mapping of model, graph, vllm,"),
        ("stages:\n  talker: {replicas: 2}\n  talker: {replicas: 3}\n", "my.yaml line 2: the key 'talker' is given twice."),
        ("defaults: {voice: low, voice: high}", "my.yaml: the key 'voice' is given twice."),
        ("defaults: {speed: 1", "my.yaml"),
        ("defaults: !!python/object:os.system {}", "could not determine a constructor for the tag"),
        ("stages: {1: {replicas: 2}}", "my.yaml: there is no setting '1' in 'stages'."),
        ("defaults: {true: 2}", "my.yaml: there is no setting 'True' in 'defaults'."),
        ("machine: {devise: cpu}", "my.yaml: there is no setting 'devise' in 'machine'. Did you mean 'device'?"),
        ("machine: {device: 1}", "my.yaml: 'machine.device' must be of type str, not 1."),
        ("tested: {dates: x}", "my.yaml: there is no setting 'dates' in 'tested'. Did you mean 'date'?"),
        ("defaults: {speed: fast}", "my.yaml: 'defaults.speed' must be of type float, not 'fast'."),
        ("defaults: {voice: 1}", "my.yaml: 'defaults.voice' must be of type str, not 1."),
    ],
)
def test_a_wrong_recipe_is_refused_by_file_and_key(tiny: str, text: str, complaint: str) -> None:
    assert complaint in refused(tiny, recipe=recipe(text))


def test_a_whole_recipe_is_accepted(tiny: str) -> None:
    text = """
        model: [org/one, org/two]
        graph: full
        vllm: ">=0.32,<0.33"
        machine: {device: cpu, name: any, count: 1}
        stages:
          talker: {replicas: 1, args: {rate: 1}}
          singer:
        edges: {"talker->singer": {connector: auto, window: 32MiB}}
        defaults:
        tested: {date: 2026-11-30, versions: {vllm: 0.32.0}, figures: {seconds: 1.5}}
    """
    deployment = deploy(tiny, recipe=recipe(text))
    assert deployment.recipe.sources["tested.date"] == "my.yaml"
    assert deployment.recipe.sources["stages.singer.replicas"] == "tiny_one/default.yaml"
    assert deploy(tiny, recipe=recipe("")).recipe == deploy(tiny).recipe


def test_numbered_devices_are_taken_where_the_machine_has_them(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "cuda")
    deployment = deploy(tiny, settings=["talker.devices=[1, 0]", "machine.device=cuda", "machine.count=2"])
    assert deployment.recipe.device == "cuda"
    assert deployment.recipe.stages["talker"].devices == (1, 0)
    complaint = refused(tiny, settings=["talker.devices=[2]", "machine.count=2"])
    assert complaint == "--set: 'stages.talker.devices' names device 2, but of 'machine.count' 2 the last is 1."
    monkeypatch.setenv("VLLM_OMNI_TARGET_DEVICE", "cdua")
    assert "Did you mean 'cuda'?" in refused(tiny)


# ---- recipes by name


def test_a_shipped_recipe_is_found_by_its_name(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped/vllm_omni_recipes/tiny"
    shipped.mkdir(parents=True)
    (shipped.parent / "__init__.py").touch()
    (shipped / "any-fast.yaml").write_text("defaults: {speed: 9}")
    monkeypatch.delitem(sys.modules, "vllm_omni_recipes", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "shipped"))
    assert value(deploy(tiny, recipe="tiny/any-fast"), "defaults.speed") == (9.0, "recipe tiny/any-fast")
    wrong = refused(tiny, NotFoundError, recipe="tiny/any-fats")
    assert wrong == "--recipe: there is neither a file nor a shipped recipe 'tiny/any-fats'. Did you mean 'tiny/any-fast'?"


# ---- vLLM


def test_vllm_settings_go_through_unread(spoken: str) -> None:
    file = recipe("stages: {talker: {vllm: {max_model_len: 8192, hf_overrides: {a: 1, b: {c: 2}}}}}")
    deployment = deploy(spoken, recipe=file, settings=["talker.vllm.hf_overrides.b.c=3", "talker.vllm.dtype=half"])
    assert deployment.recipe.stages["talker"].vllm == {"max_model_len": 8192, "hf_overrides": {"a": 1, "b": {"c": 3}}, "dtype": "half"}
    assert deployment.recipe.sources["stages.talker.vllm.max_model_len"] == "my.yaml"
    assert deployment.recipe.sources["stages.talker.vllm.hf_overrides.b.c"] == "--set"


def test_a_mapping_takes_the_place_of_a_value(spoken: str) -> None:
    deployment = deploy(spoken, settings=["talker.vllm.x=1", "talker.vllm.x.y=2", "talker.vllm.x.z=3"])
    assert deployment.recipe.stages["talker"].vllm == {"x": {"y": 2, "z": 3}}


def test_bare_engine_flags_go_to_the_main_stage_and_win(spoken: str) -> None:
    flags = {"max-model-len": "4096", "enforce_eager": "true", "hf-overrides": '{"a": 1}', "kv-transfer-config.kv_role": "both"}
    deployment = deploy(spoken, settings=["talker.vllm.max_model_len=1"], flags=flags)
    assert deployment.recipe.stages["talker"].vllm == {
        "max_model_len": 4096, "enforce_eager": True, "hf_overrides": {"a": 1}, "kv_transfer_config": {"kv_role": "both"}
    }  # fmt: skip
    assert deployment.recipe.sources["stages.talker.vllm.max_model_len"] == "--max-model-len"


def test_bare_engine_flags_need_a_stage_that_takes_them(tiny: str) -> None:
    complaint = refused(tiny, flags={"max-model-len": "4096"})
    assert complaint == "There is no flag --max-model-len, and no stage of graph 'full' takes vLLM's."


def test_only_stages_on_vllm_take_its_settings(spoken: str) -> None:
    complaint = refused(spoken, recipe=recipe("stages: {singer: {vllm: {dtype: half}}}"))
    assert complaint.startswith("my.yaml: 'stages.singer.vllm.dtype' has no effect: stage 'singer' does not run on vLLM.")


def test_a_recipe_for_another_vllm_is_refused_where_it_matters(site: Path, tiny: str, spoken: str) -> None:
    distribution(site, "vllm", "0.30.1+cpu", plugin=None)
    file = recipe('vllm: ">=0.32,<0.33"')
    complaint = refused(spoken, recipe=file)
    assert complaint.startswith("my.yaml: this recipe is for vLLM <0.33,>=0.32, but vllm 0.30.1+cpu is installed.")
    assert complaint.endswith("Install it with: pip install 'vllm<0.33,>=0.32'")
    assert deploy(spoken, recipe=recipe('vllm: ">=0.30,<0.31"')).recipe.sources["vllm"] == "my.yaml"
    assert deploy(tiny, recipe=recipe('vllm: ">=0.32,<0.33"')).recipe.sources["vllm"] == "my.yaml"
