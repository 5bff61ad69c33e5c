"""What changes on the way between two stages. A bridge never relies on how a stream was cut into chunks."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import numpy as np

from vllm_omni.api import Job, Payload, text
from vllm_omni_echo.plugin import COLOUR, LOUDNESS

LINE_LENGTH = 40
"""Characters in a drawn line, unless one word alone is longer."""

Streams = dict[str, AsyncIterator[Payload]]


async def melody(inputs: Streams, job: Job) -> AsyncIterator[Payload]:
    """speaker.pitch [+ listener.loudness] -> the mean loudness, if any, then the pitches as they come."""
    if loudness := [chunk.data async for chunk in inputs.get("listener.loudness", nothing())]:
        yield Payload(LOUDNESS, np.concatenate(loudness).mean(keepdims=True))
    async for chunk in inputs["speaker.pitch"]:
        yield chunk


async def lines(inputs: Streams, job: Job) -> AsyncIterator[Payload]:
    """speaker.text + speaker.pitch [+ listener.colour] -> the mean colour, if any, then lines of text.

    A line's meta `hz` has the pitch of each word. Both streams are read in step, so neither waits in full for the other.
    """
    if colours := [chunk.data async for chunk in inputs.get("listener.colour", nothing())]:
        yield Payload(COLOUR, np.concatenate(colours).mean(axis=0, keepdims=True))
    line = ""
    hz: list[float] = []
    waiting: list[float] = []
    async for word in words(inputs["speaker.text"]):
        while not waiting:
            waiting += (await anext(inputs["speaker.pitch"])).data[:, 0].tolist()
        if line and ("\n" in word or len(line) + len(word) > LINE_LENGTH):
            yield text(line, hz=hz)
            line, hz = "", []
        line += word if line else word.lstrip()
        hz.append(waiting.pop(0))
    if line:
        yield text(line, hz=hz)


async def words(chunks: AsyncIterator[Payload]) -> AsyncIterator[str]:
    """Whole words, each with the space before it. A word is known to be whole when the next one begins."""
    held = ""
    async for chunk in chunks:
        *whole, held = re.findall(r"\s*\S+|\s+$", held + chunk.data) or [""]
        for word in whole:
            yield word
    if held.strip():
        yield held


async def nothing() -> AsyncIterator[Payload]:
    """The stream of an edge that is not there."""
    return
    yield
