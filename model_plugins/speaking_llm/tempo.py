"""Speech made faster or slower at the same pitch (WSOLA): overlapping pieces laid closer together or further apart.

Each piece is taken from where it continues the one before it best, so that the periods of the voice line up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Sound = npt.NDArray[np.float32]
PIECE, STEP, SEARCH = 1024, 512, 256
"""In samples: at 24 kHz pieces of 43 ms, half overlapping, each moved by up to 11 ms to fit."""
BEFORE, AFTER = STEP + SEARCH, PIECE + STEP + SEARCH
"""Silence around the sound, so that no piece reaches beyond it."""


def at_tempo(sound: Sound, tempo: float) -> Sound:
    """`sound` in `1 / tempo` of its time."""
    if tempo == 1:
        return sound
    length = round(len(sound) / tempo)
    source = np.pad(sound, (BEFORE, AFTER))
    window = np.hanning(PIECE + 1)[:PIECE].astype(np.float32)  # two that overlap by half add up to one
    out = np.zeros(length + 2 * PIECE, np.float32)
    at = BEFORE - STEP
    out[:PIECE] = window * source[at : at + PIECE]  # out is STEP ahead, so that the first piece's fade-in is cut off
    for start in range(STEP, length + STEP, STEP):
        wished = BEFORE + min(round((start - STEP) * tempo), len(sound))
        following = source[at + STEP : at + STEP + PIECE]
        fits = np.correlate(source[wished - SEARCH : wished + SEARCH + PIECE], following, "valid")
        at = wished - SEARCH + int(fits.argmax())
        out[start : start + PIECE] += window * source[at : at + PIECE]
    return out[STEP : STEP + length]
