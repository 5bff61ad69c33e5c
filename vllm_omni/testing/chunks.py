"""Streams of chunks as values: cut them another way, join, compare and check them. Arrays may be numpy's or torch's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_omni.payload import ACTION, AUDIO, IMAGE, TEXT, VIDEO, Kind, Payload

MAX_PIECES = 64
"""A chunk is cut into about this many pieces at most: sound cut into single samples would take minutes."""
FORMS = {IMAGE: ("uint8", 3), VIDEO: ("uint8", 4), AUDIO: ("float32", 1), ACTION: ("float32", 2)}
"""Type and number of dimensions, as `vllm_omni.payload` says them."""


def array(data: Any) -> npt.NDArray[Any]:
    """A numpy array, or a torch tensor of any device and type, as numpy (bfloat16 as float32, which holds it exactly)."""
    if isinstance(data, np.ndarray):
        return data
    data = data.detach().cpu()
    return np.asarray(data.float() if str(data.dtype) == "torch.bfloat16" else data)


def as_sent(chunks: Sequence[Payload]) -> list[Payload]:
    return list(chunks)


def in_pieces(chunks: Sequence[Payload]) -> list[Payload]:
    """Every chunk cut up: text by characters, arrays by rows; pictures stay whole. Each piece keeps the meta of its chunk."""
    pieces: list[Payload] = []
    for chunk in chunks:
        length = 0 if chunk.kind == IMAGE else _length(chunk.data)
        step = max(1, length // MAX_PIECES)
        pieces += [Payload(chunk.kind, chunk.data[at : at + step], chunk.meta) for at in range(0, length, step)] or [chunk]
    return pieces


def as_whole(chunks: Sequence[Payload]) -> list[Payload]:
    """Neighbours of one kind joined to one chunk; of meta that differs the last value is kept."""
    wholes: list[Payload] = []
    for kind, group in groupby(chunks, key=lambda chunk: chunk.kind):
        run = list(group)
        data = joined([chunk.data for chunk in run])
        if kind == IMAGE or isinstance(data, tuple):
            wholes += run
        else:
            meta = {name: value for chunk in run for name, value in chunk.meta.items()}
            wholes.append(Payload(kind, data, meta))
    return wholes


CUTS: tuple[Callable[[Sequence[Payload]], list[Payload]], ...] = (as_sent, in_pieces, as_whole)


def joined(data: Sequence[Any]) -> Any:
    """The whole that these deltas make: text, bytes, an array or a tensor; data without rows, or of unequal widths, as a tuple."""
    if all(isinstance(piece, str) for piece in data):
        return "".join(data)
    if all(isinstance(piece, bytes) for piece in data):
        return b"".join(data)
    if any(not piece.ndim or piece.shape[1:] != data[0].shape[1:] for piece in data):
        return tuple(data)
    if all(isinstance(piece, np.ndarray) for piece in data):
        return np.concatenate(data)
    import torch

    return torch.cat(list(data))


def by_kind(chunks: Iterable[Payload]) -> dict[str, Any]:
    """The whole of each kind in a mixed stream; pictures as a tuple of them."""
    found: dict[Kind, list[Any]] = {}
    for chunk in chunks:
        found.setdefault(chunk.kind, []).append(chunk.data)
    return {kind.name: tuple(data) if kind == IMAGE else joined(data) for kind, data in found.items()}


def assert_same(left: Any, right: Any, tolerance: float = 0.0, where: str = "") -> None:
    """Fails unless both are equal; numbers in arrays may be `tolerance` apart. Takes what `by_kind` and `joined` give."""
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys(), f"{where}: {sorted(left)} on one side, {sorted(right)} on the other"
        for name in left:
            assert_same(left[name], right[name], tolerance, f"{where}, {name}")
    elif isinstance(left, tuple) and isinstance(right, tuple):
        assert len(left) == len(right), f"{where}: {len(left)} items on one side, {len(right)} on the other"
        for one, other in zip(left, right, strict=True):
            assert_same(one, other, tolerance, where)
    elif isinstance(left, str | bytes) or isinstance(right, str | bytes):
        assert left == right, where
    else:
        one, other = array(left), array(right)
        assert one.dtype == other.dtype, f"{where}: {one.dtype} on one side, {other.dtype} on the other"
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance, err_msg=where)


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


async def replay(chunks: Iterable[Payload]) -> AsyncIterator[Payload]:
    """These chunks as the stream a bridge or an engine reads."""
    for chunk in chunks:
        yield chunk


def _length(data: Any) -> int:
    """How many rows or characters can be cut apart; 0 for a number without rows."""
    return len(data) if isinstance(data, str | bytes) or data.ndim else 0
