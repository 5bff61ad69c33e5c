"""What moves between stages: one chunk of one kind.

Data is a `str` (text), `bytes`, a numpy array or a torch tensor; this module looks at none of them and imports neither
numpy nor torch. Chunks of a stream are deltas: a consumer that joins them gets the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of content. Equal by name; `shape` tells a reader what the data looks like.

    Clients can send and receive the public kinds. A model's own kinds live on its edges only.
    """

    name: str
    shape: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name


TEXT = Kind("text", "str")
IMAGE = Kind("image", "uint8 [height, width, 3]")
AUDIO = Kind("audio", "float32 [samples] in -1..1, meta rate in Hz")
VIDEO = Kind("video", "uint8 [frames, height, width, 3], meta fps")
ACTION = Kind("action", "float32 [steps, width]")
PROGRESS = Kind("progress", '"", meta done, total: steps of all samples of a request')
PUBLIC_KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (TEXT, IMAGE, AUDIO, VIDEO, ACTION, PROGRESS)}


@dataclass(frozen=True, slots=True)
class Payload:
    """One chunk. `meta` holds plain values only (str, int, float, bool, None, and lists or maps of them)."""

    kind: Kind
    data: Any
    meta: Mapping[str, Any] = field(default_factory=dict)


def text(data: str, **meta: object) -> Payload:
    """A piece of text.

    On its way to a client, meta may carry `tokens` (how many this piece is), `prompt_tokens` (on the first piece) and
    `finish_reason` ("stop" or "length", on the last one).
    """
    return Payload(TEXT, data, meta)


def image(data: Any, **meta: object) -> Payload:
    """A picture: uint8 [height, width, 3], RGB.

    On its way to a client, meta may carry `index` (which sample of the request), `seed`, and, in a preview, `partial` (which one).
    """
    return Payload(IMAGE, data, meta)


def audio(data: Any, rate: int, **meta: object) -> Payload:
    """Sound: float32 [samples] in -1..1 at `rate` samples a second, one channel."""
    return Payload(AUDIO, data, {"rate": rate, **meta})


def video(data: Any, fps: float, **meta: object) -> Payload:
    """Frames: uint8 [frames, height, width, 3], RGB, `fps` frames a second. Meta may carry `index` and `seed`, as of a picture."""
    return Payload(VIDEO, data, {"fps": fps, **meta})


def action(data: Any, **meta: object) -> Payload:
    """Robot actions: float32 [steps, width]."""
    return Payload(ACTION, data, meta)


def progress(done: int, total: int) -> Payload:
    """So many steps are done, of so many."""
    return Payload(PROGRESS, "", {"done": done, "total": total})
