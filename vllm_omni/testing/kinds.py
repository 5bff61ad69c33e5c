"""One small sample of each public kind, and the form a chunk of it must have when it reaches a client."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vllm_omni.payload import ACTION, AUDIO, IMAGE, TEXT, VIDEO, Kind, Payload, action, audio, image, video
from vllm_omni.testing.chunks import array

PLAIN = (str, int, float, bool, type(None))


def samples() -> dict[Kind, Payload]:
    """A sample of each kind but text: a picture of 8x6 pixels, a tenth of a second of sound, three frames, two actions."""
    picture = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    sound = (0.5 * np.sin(np.arange(1600) * 0.1)).astype(np.float32)
    return {
        IMAGE: image(picture),
        AUDIO: audio(sound, 16_000),
        VIDEO: video(np.stack([picture, picture[::-1], picture]), 8.0),
        ACTION: action(np.linspace(-1, 1, 14, dtype=np.float32).reshape(2, 7)),
    }


def assert_well_formed(chunk: Payload) -> None:
    """Fails unless the chunk has the type, shape and meta that `vllm_omni.payload` gives its kind."""
    assert_plain(chunk.meta)
    if chunk.kind == TEXT:
        assert isinstance(chunk.data, str)
        return
    data = array(chunk.data)
    if chunk.kind == IMAGE:
        assert data.dtype == np.uint8
        assert data.ndim == 3
        assert data.shape[2] == 3
    elif chunk.kind == VIDEO:
        assert data.dtype == np.uint8
        assert data.ndim == 4
        assert data.shape[3] == 3
        assert chunk.meta["fps"] > 0
    elif chunk.kind == AUDIO:
        assert data.dtype == np.float32
        assert data.ndim == 1
        assert np.abs(data).max(initial=0) <= 1, "samples beyond -1..1"
        assert isinstance(chunk.meta["rate"], int)
        assert chunk.meta["rate"] > 0
    else:
        assert data.dtype == np.float32
        assert data.ndim == 2
        assert np.isfinite(data).all()


def assert_plain(meta: object) -> None:
    """Fails unless meta is made of plain values, as every process and every client can read."""
    if isinstance(meta, Mapping):
        assert all(isinstance(name, str) for name in meta)
        for value in meta.values():
            assert_plain(value)
    elif isinstance(meta, list | tuple):
        for value in meta:
            assert_plain(value)
    else:
        assert type(meta) in PLAIN, f"meta holds a {type(meta).__name__}"
