"""The singer turns pitches into tones, as loud as the client was.

It carries the phase from word to word, so that a melody sung in pieces is the whole one, sample for sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_omni.api import Job, OneShotModule, Payload, StageContext, audio
from vllm_omni_echo.plugin import LOUDNESS, PITCH

Wave = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
WAVES: dict[str, Wave] = {
    "sine": lambda turns: np.sin(2 * np.pi * turns),
    "square": lambda turns: np.where(turns % 1 < 0.5, 1.0, -1.0),
    "triangle": lambda turns: 1 - 4 * np.abs((turns + 0.25) % 1 - 0.5),
    "saw": lambda turns: 2 * (turns % 1) - 1,
}
WAVES["alloy"] = WAVES["sine"]
QUIET = 0.25
"""Peak of a tone when the client sent no sound."""


@dataclass
class Song:
    """One request: how it is sung, and where the wave stands (`phase`, in turns) after `sung` words."""

    wave: Wave
    samples: int
    fail_at: int | None
    peak: float = QUIET
    phase: float = 0.0
    sung: int = 0


class Singer(OneShotModule):
    def load(self, ctx: StageContext) -> None:
        self.rate: int = ctx.args["rate"]
        self.tone_ms: float = ctx.args["tone_ms"]

    def open(self, job: Job) -> Song:
        samples = round(self.rate * self.tone_ms / 1000 / job.params["speed"])
        return Song(WAVES[job.params["voice"]], max(1, samples), job.params.get("fail_singing_at"))

    def shape_key(self, song: Song, chunk: Payload) -> object:
        return chunk.kind.name, chunk.data.shape[1:]

    def run(self, rows: Sequence[tuple[Song, Payload]]) -> Sequence[Sequence[Payload]]:
        if rows[0][1].kind == LOUDNESS:
            for song, chunk in rows:
                song.peak = float(chunk.data.mean())
            return [()] * len(rows)
        for song, chunk in rows:  # before any state moves: when a call raises, its rows are run again
            if song.fail_at is not None and song.sung <= song.fail_at < song.sung + len(chunk.data):
                raise RuntimeError(f"the singer was told to break down at word {song.fail_at}")
        pitches = np.concatenate([chunk.data for _, chunk in rows])
        if np.ptp(pitches, axis=1).any():
            raise ValueError(f"a row of {PITCH} arrived damaged: its columns differ")
        cuts = np.cumsum([len(chunk.data) for _, chunk in rows])[:-1]
        return [self._sing(song, hz) for (song, _), hz in zip(rows, np.split(pitches[:, 0], cuts), strict=True)]

    def _sing(self, song: Song, pitches: npt.NDArray[np.float32]) -> list[Payload]:
        sound = np.empty((len(pitches), song.samples), np.float32)
        for row, hz in zip(sound, pitches.astype(np.float64), strict=True):
            step = hz / self.rate
            row[:] = song.peak * song.wave(song.phase + step * np.arange(song.samples))
            song.phase = (song.phase + step * song.samples) % 1
        song.sung += len(pitches)
        return [audio(sound.reshape(-1), self.rate)]
