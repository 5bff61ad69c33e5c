"""One small sample of each kind that a client can send: for warm-up requests and for tests."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_omni.payload import ACTION, AUDIO, IMAGE, TEXT, VIDEO, Kind, Payload, action, audio, image, text, video


def samples() -> Mapping[Kind, Payload]:
    """A word, a picture of 64 x 48 pixels, a tenth of a second of sound, three frames, two actions."""
    import numpy as np

    picture = np.tile(np.arange(48, dtype=np.uint8)[:, None, None] * 5, (1, 64, 3))
    return {
        TEXT: text("Hello"),
        IMAGE: image(picture),
        AUDIO: audio((0.5 * np.sin(np.arange(1600) * 0.1)).astype(np.float32), 16_000),
        VIDEO: video(np.stack([picture, picture[::-1], picture]), 8.0),
        ACTION: action(np.linspace(-1, 1, 14, dtype=np.float32).reshape(2, 7)),
    }
