"""The fused steps, computed by Triton's interpreter, against the same in torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from vllm_omni.kit.fused import gated, placed

torch.manual_seed(0)
for tokens, width in ((1, 8), (7, 1500)):
    wide = torch.randn(tokens, 2 * width)
    expected = gated(wide, fused=False)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(gated(wide, fused=True), expected, rtol=1e-5, atol=1e-6)
for tokens, many, kept, wide, normed in ((5, 4, 2, 16, True), (3, 3, 1, 32, False)):
    heads = torch.randn(tokens, many + 2 * kept, wide)
    angles = torch.randn(tokens, wide // 2)
    norms = tuple(torch.randn(wide) if normed else None for _ in range(2))
    places = torch.randperm(9)[:tokens].int()
    made = []
    for fused in (False, True):
        parts = torch.zeros(tokens, many, wide), torch.zeros(9, kept, wide), torch.zeros(9, kept, wide)
        placed(heads, *parts, places, angles.cos(), angles.sin(), norms, 1e-6, fused=fused)
        made.append(parts)
    assert all(each.abs().max() > 0.1 for each in made[0])
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-6)
print("same")
"""


def test_what_triton_computes_is_what_torch_computes() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr
