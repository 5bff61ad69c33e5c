"""How long the detection of the device takes in a new process, with its imports, beside the import of setuptools, which each build pays."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 11
TIMED = "import time; begun = time.perf_counter(); {}; print(time.perf_counter() - begun)"
DETECT, SETUPTOOLS = "from vllm_omni_platforms.detect import detect; detect()", "import setuptools"


def milliseconds(code: str) -> float:
    """The median over new processes."""
    command = [sys.executable, "-c", TIMED.format(code)]
    told = [float(subprocess.run(command, capture_output=True, check=True, text=True).stdout) for _ in range(ROUNDS)]
    return sorted(told)[ROUNDS // 2] * 1000


def test_detection_is_a_small_part_of_a_build() -> None:
    ours, theirs = milliseconds(DETECT), milliseconds(SETUPTOOLS)
    print(f"detect: {ours:.1f} ms (at most 50), setuptools: {theirs:.1f} ms, ratio {ours / theirs:.2f}")
    assert ours < theirs
