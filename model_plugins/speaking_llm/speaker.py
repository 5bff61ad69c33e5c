"""The speaker says sentences with Kokoro-82M (int8 ONNX, on the CPU): text in, 24 kHz sound out.

It carries nothing from sentence to sentence: a sentence sounds the same whoever else is speaking. It reads English only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_omni.api import Job, OneShotModule, Payload, StageContext, audio
from vllm_omni_speaking_llm.kokoro import can_multiply_signed
from vllm_omni_speaking_llm.phonemes import English
from vllm_omni_speaking_llm.plugin import DEFAULT_VOICE
from vllm_omni_speaking_llm.reading import spoken
from vllm_omni_speaking_llm.tempo import at_tempo
from vllm_omni_speaking_llm.weights import kokoro_data, kokoro_file

Sound = npt.NDArray[np.float32]
RATE = 24_000
MAX_PHONEMES = 400
"""In one run. Kokoro takes 510, but hurries and slurs when there are so many."""
SENTENCE_PAUSE, CLAUSE_PAUSE, NO_PAUSE = 0.2, 0.1, 0.02
"""Silence after a piece, in seconds at speed 1: after one that ends in `.`, `!`, `?` or nothing, at a comma, and in mid-phrase."""
SLOWEST, FASTEST = 0.5, 1.1
"""What Kokoro itself is asked for; beyond, it swallows or drawls (see README.md), so its sound is stretched or pressed instead."""
AUDIBLE = 0.004
"""Kokoro begins and ends with near silence, of very different lengths; below this it is cut off, but for a margin."""
MARGIN, FADE = 0.03, 0.005


@dataclass
class Voice:
    """How one request is spoken, and whether it was. `styles` is float32 [phonemes, 1, 256]: Kokoro's depend on a sentence's length."""

    styles: npt.NDArray[np.float32]
    speed: float
    heard: bool = False


class Speaker(OneShotModule):
    def load(self, ctx: StageContext) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = ctx.args["threads"], 1
        self.session = onnxruntime.InferenceSession(str(kokoro_file(can_multiply_signed())), options, providers=["CPUExecutionProvider"])
        self.ids: dict[str, int] = json.loads(kokoro_data("vocab.json").read_text(encoding="utf-8"))["vocab"]
        with np.load(kokoro_data("voices_ja.npz")) as styles:
            self.voices: dict[str, Any] = dict(styles)
        self.voices["alloy"] = self.voices[DEFAULT_VOICE]
        self.english = English()
        self._sound(Voice(self.voices[DEFAULT_VOICE], 1.0), "wˈʌn", False)  # the first run takes longer than others: nobody waits for it

    def open(self, job: Job) -> Voice:
        return Voice(self.voices[job.params["voice"]], job.params["speed"])

    def run(self, rows: Sequence[tuple[Voice, Payload]]) -> Sequence[Sequence[Payload]]:
        return [[audio(sound, RATE) for sound in self._say(voice, sentence)] for voice, sentence in rows]

    def flush(self, voice: Voice) -> Iterator[Payload]:
        if not voice.heard:  # an answer of nothing but code, say: whoever asked for sound gets some
            yield audio(np.zeros(round(SENTENCE_PAUSE * RATE), np.float32), RATE)

    def _say(self, voice: Voice, sentence: Payload) -> Iterator[Sound]:
        """The sentence as one sound; none when it has nothing to say."""
        pieces = list(cut(self.english(spoken(sentence.data))))
        if pieces:
            voice.heard = True
            yield np.concatenate([self._sound(voice, piece, sentence.meta.get("goes_on", False)) for piece in pieces])

    def _sound(self, voice: Voice, phonemes: str, goes_on: bool) -> Sound:
        ids = [self.ids[phoneme] for phoneme in phonemes if phoneme in self.ids]
        tempo = min(max(voice.speed, SLOWEST), FASTEST)
        (sound,) = self.session.run(None, {
            "tokens": np.array([[0, *ids, 0]], np.int64),
            "style": voice.styles[len(ids) - 1],
            "speed": np.array([tempo], np.float32),
        })  # fmt: skip
        pause = NO_PAUSE if goes_on else CLAUSE_PAUSE if phonemes[-1] in ",;:" else SENTENCE_PAUSE
        return trimmed(at_tempo(sound.reshape(-1), voice.speed / tempo), round(pause / voice.speed * RATE))


def cut(phonemes: str, longest: int = MAX_PHONEMES) -> Iterator[str]:
    """Pieces of at most `longest` phonemes, cut behind the last mark that fits, or else the last word; nothing is lost but blanks."""
    while len(phonemes := phonemes.strip()) > longest:
        marks = [found.end() for found in re.finditer(r"[,;:.!?](?= )", phonemes[: longest + 1])]
        at = marks[-1] if marks else phonemes.rfind(" ", 1, longest + 1)
        at = at if at > 0 else longest
        yield phonemes[:at]
        phonemes = phonemes[at:]
    if re.search(r"\w", phonemes):
        yield phonemes


def trimmed(sound: Sound, pause: int) -> Sound:
    """`sound` without the silence around it, then `pause` samples of silence; within -1..1, and no click where it begins or ends."""
    loud = np.flatnonzero(np.abs(sound) > AUDIBLE)
    if not len(loud):
        return np.zeros(pause, np.float32)
    margin, fade = round(MARGIN * RATE), round(FADE * RATE)
    whole = np.zeros(min(len(sound), loud[-1] + margin) - max(0, loud[0] - margin) + pause, np.float32)
    heard = whole[: len(whole) - pause]
    heard[:] = sound[max(0, loud[0] - margin) : loud[-1] + margin]
    ramp = np.linspace(0, 1, fade, dtype=np.float32)[: len(heard)]
    heard[: len(ramp)] *= ramp
    heard[len(heard) - len(ramp) :] *= ramp[::-1]
    whole /= max(1.0, float(np.abs(whole).max()))
    return whole
