"""The speaker says the last user message again, a word at a time, and gives each word a pitch.

It is the stage that streams: `run` only collects, `flush` hands out words. It makes no sound.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_omni.api import AUDIO, IMAGE, TEXT, Job, OmniError, OneShotModule, Pause, Payload, RequestError, StageContext, text
from vllm_omni_echo.plugin import PITCH

SCALE = tuple(220 * 2 ** (step / 12) for step in (0, 2, 4, 7, 9, 12, 14, 16, 19, 21))
"""Two octaves of a pentatonic scale, in Hz: any two notes of it sound well together."""


@dataclass
class Speech:
    """One request: the words of the last user message so far, and the size of the whole conversation."""

    job: Job
    turn: int = -1
    words: list[str] = field(default_factory=list)
    heard: int = 0
    chars: int = 0


class Speaker(OneShotModule):
    def load(self, ctx: StageContext) -> None:
        self.max_chars: int = ctx.args["max_chars"]

    def open(self, job: Job) -> Speech:
        return Speech(job)

    def run(self, rows: Sequence[tuple[Speech, Payload]]) -> Sequence[Sequence[Payload] | OmniError]:
        return [self._hear(speech, part) for speech, part in rows]

    def _hear(self, speech: Speech, part: Payload) -> Sequence[Payload] | OmniError:
        said = _spoken(part)
        speech.chars += len(said)
        if speech.chars > self.max_chars:
            message = f"The conversation is longer than {self.max_chars} characters: shorten it, or raise the speaker's argument max_chars."
            return RequestError(message, param="messages")
        words = re.findall(r"\s*\S+", said)
        speech.heard += len(words)
        if part.meta["role"] == "user":
            if part.meta["turn"] != speech.turn:
                speech.turn, speech.words = part.meta["turn"], []
            if words:
                words[0] = f" {words[0].lstrip()}" if speech.words else words[0].lstrip()
            speech.words += words
        return ()

    def flush(self, speech: Speech) -> Iterator[Payload | Pause]:
        wants, params = speech.job.wants, speech.job.params
        words = speech.words[: params.get("max_tokens")]
        if not words:
            raise RequestError("There is nothing to say: the conversation ends without a word from the user.", param="messages")
        draws = np.random.default_rng(params["seed"] % 2**64).integers(len(SCALE), size=len(words))  # no other request's draws move them
        for index, word in enumerate(words):
            if params["delay_ms"]:
                yield Pause(params["delay_ms"] / 1000)
            if index == params.get("fail_at"):
                raise RuntimeError(f"the speaker was told to break down at word {index}")
            if TEXT in wants:
                yield text(word, **_counts(speech, index, len(words)))
            if PITCH in wants:
                note = (zlib.crc32(word.strip().encode("utf-8", "surrogatepass")) + draws[index]) % len(SCALE)
                row = np.full((1, max(1, params["array_kib"] * 256)), SCALE[note], np.float32)
                yield Payload(PITCH, row)


def _spoken(part: Payload) -> str:
    """How a part is said: text as it is, a picture or a sound as one word with its size."""
    if part.kind == IMAGE:
        return f"image:{part.data.shape[1]}x{part.data.shape[0]}"
    if part.kind == AUDIO:
        return f"audio:{len(part.data) / part.meta['rate']:.2f}s"
    return str(part.data)


def _counts(speech: Speech, index: int, count: int) -> dict[str, object]:
    counts: dict[str, object] = {"tokens": 1}
    if index == 0:
        counts["prompt_tokens"] = speech.heard
    if index == count - 1:
        counts["finish_reason"] = "stop" if count == len(speech.words) else "length"
    return counts
