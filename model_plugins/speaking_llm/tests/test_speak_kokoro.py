"""The changed graph says the same as the one in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from vllm_omni_speaking_llm import kokoro
from vllm_omni_speaking_llm.weights import kokoro_data, kokoro_file


def session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def said(session: Any, length: int, voice: str, speed: float) -> Any:
    tokens = np.random.default_rng(length).integers(43, 150, length)
    with np.load(kokoro_data("voices_ja.npz")) as styles:
        inputs = {"tokens": np.array([[0, *tokens, 0]]), "style": styles[voice][length - 1], "speed": np.array([speed], np.float32)}
    return session.run(None, inputs)[0]


def test_all_convolutions_over_time_are_products() -> None:
    before, after = (
        [node.op_type for node in onnx.load(str(kokoro_file(products)), load_external_data=False).graph.node] for products in (False, True)
    )
    assert before.count("ConvInteger") > 80
    assert after.count("ConvInteger") < 5, "those with a stride"
    assert after.count("MatMulInteger") == before.count("MatMulInteger") + before.count("ConvInteger") - after.count("ConvInteger")


@pytest.mark.skipif(not kokoro.can_multiply_signed(), reason="this processor's signed products saturate, so they are not used on it")
def test_products_give_the_same_sound_bit_for_bit() -> None:
    given, changed = session(kokoro_file(products=False)), session(kokoro_file(products=True))
    cases = [(3, "jm_kumo", 1.0), (20, "jf_gongitsune", 1.0), (20, "jm_kumo", 1.0), (20, "jm_kumo", 0.8)]
    sounds = [said(given, *case) for case in cases]
    assert len({sound.tobytes() for sound in sounds}) == len(cases), "the reference reacts to tokens, voice and speed"
    for case, sound in zip(cases, sounds, strict=True):
        np.testing.assert_array_equal(said(changed, *case), sound)


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx512_vnni amx_int8", True), ("fpu avx_vnni", True), ("fpu avx2 avx512f", False), ("", False)]
)
def test_only_processors_that_multiply_signed_bytes_get_products(flags: str, expected: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nvmx flags : avx_vnni_not\n" if flags else "Features : asimd\n")
    assert kokoro.can_multiply_signed(cpuinfo) is expected
    assert not kokoro.can_multiply_signed(tmp_path / "missing")
