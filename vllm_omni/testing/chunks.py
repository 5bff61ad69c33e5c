"""Streams of chunks as values: cut them another way, join them, compare them. Arrays may be numpy's or torch's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_omni.payload import IMAGE, Payload

MAX_PIECES = 64
"""A chunk is cut into about this many pieces at most: sound cut into single samples would take minutes."""


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
        if chunk.kind == IMAGE or not _length(chunk.data):
            pieces.append(chunk)
            continue
        step = max(1, _length(chunk.data) // MAX_PIECES)
        pieces += [Payload(chunk.kind, chunk.data[at : at + step], chunk.meta) for at in range(0, _length(chunk.data), step)]
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
    found: dict[str, list[Any]] = {}
    pictures: list[Any] = []
    for chunk in chunks:
        if chunk.kind == IMAGE:
            pictures.append(chunk.data)
        else:
            found.setdefault(chunk.kind.name, []).append(chunk.data)
    wholes = {name: joined(data) for name, data in found.items()}
    return wholes | ({IMAGE.name: tuple(pictures)} if pictures else {})


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


async def replay(chunks: Iterable[Payload]) -> AsyncIterator[Payload]:
    """These chunks as the stream a bridge or an engine reads."""
    for chunk in chunks:
        yield chunk


def _length(data: Any) -> int:
    """How many rows or characters can be cut apart; 0 for a number without rows."""
    return len(data) if isinstance(data, str | bytes) or data.ndim else 0
