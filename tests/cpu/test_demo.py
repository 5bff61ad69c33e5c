"""`vllm-omni demo` as a user runs it, and the recipes that are shipped."""

from __future__ import annotations

import re
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from PIL import Image

import vllm_omni_recipes

RECIPES = Path(vllm_omni_recipes.__file__).parent


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vllm_omni", *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def test_the_demo_answers_in_three_kinds_and_ends(tmp_path: Path) -> None:
    ran = command("demo", "echo", "--ask", "one two three four", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("one two three four") == 2, "the question and the answer"
    with wave.open(str(tmp_path / "answer.wav")) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 24_000)
        assert sound.getnframes() == 4 * 0.12 * 24_000, "four words of 120 ms, as the plugin's recipe says"
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.format == "PNG"
    rows = ran.stdout.splitlines()
    for stage in ("speaker", "singer", "painter"):
        (row,) = [row for row in rows if row.startswith(stage)]
        queued, first, done = map(float, row.split()[1:4])
        assert 0 <= queued <= first <= done
    assert re.fullmatch(r"Sound began \d\.\d\d s (before|after) the end of the text\.", rows[-1])


@pytest.mark.parametrize("recipe", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_a_shipped_recipe_fits_its_model(recipe: Path) -> None:
    name = recipe.relative_to(RECIPES).with_suffix("").as_posix()
    ran = command("serve", name.partition("/")[0], "--recipe", name, "--dry-run")
    assert ran.returncode == 0, ran.stderr
    assert f"recipe {name}" in ran.stdout, "at least one value comes from it"
