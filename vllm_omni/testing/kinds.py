"""One small sample of each public kind, and the form a chunk of it must have when it reaches a client."""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_omni.payload import ACTION, AUDIO, IMAGE, TEXT, VIDEO, Kind, Payload, action, audio, image, video
from vllm_omni.testing.chunks import array

FORMS = {IMAGE: ("uint8", 3), VIDEO: ("uint8", 4), AUDIO: ("float32", 1), ACTION: ("float32", 2)}
"""Type and number of dimensions, as `vllm_omni.payload` says them."""


def samples() -> dict[Kind, Payload]:
    """A sample of each kind but text: a picture of 8x6 pixels, a tenth of a second of sound, three frames, two actions."""
    picture = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    sound = (0.5 * np.sin(np.arange(1600) * 0.1)).astype(np.float32)
    frames = np.stack([picture, picture[::-1], picture])
    return {
        IMAGE: image(picture),
        AUDIO: audio(sound, 16_000),
        VIDEO: video(frames, 8.0),
        ACTION: action(np.linspace(-1, 1, 14, dtype=np.float32).reshape(2, 7)),
    }


def assert_well_formed(chunk: Payload) -> None:
    """Fails unless the chunk has the type, shape and meta of its kind, and meta is made of values that any process can read."""
    msgspec.msgpack.encode(dict(chunk.meta))
    if chunk.kind == TEXT:
        assert isinstance(chunk.data, str)
        return
    data = array(chunk.data)
    assert (str(data.dtype), data.ndim) == FORMS[chunk.kind]
    if chunk.kind in (IMAGE, VIDEO):
        assert data.shape[-1] == 3, "not RGB"
    else:
        assert np.isfinite(data).all()
    if chunk.kind == AUDIO:
        assert np.abs(data).max(initial=0) <= 1, "samples beyond -1..1"
    if chunk.kind in (AUDIO, VIDEO):
        assert chunk.meta["rate" if chunk.kind == AUDIO else "fps"] > 0
