"""One answer while it is made: what the model gives, as the words and files that a client gets, and what is counted on the way.

It knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm_omni.errors import StageError
from vllm_omni.payload import AUDIO, IMAGE, TEXT, Kind, Payload
from vllm_omni.request import Request
from vllm_omni.serving.audio import Encoder
from vllm_omni.serving.image import encode_png
from vllm_omni.serving.server import Server


class Answer:
    """The answer to a request; `sound` encodes its audio. What is counted is right when `parts` has ended."""

    def __init__(self, server: Server, request: Request, sound: Encoder) -> None:
        self.server = server
        self.request = request
        self.sound = sound
        self.prompt_tokens = self.tokens = 0
        self.finish_reason = "stop"

    async def parts(self) -> AsyncGenerator[tuple[Kind, Any], None]:
        """What a client gets, piece by piece: text as str, sound and pictures as the bytes of a file.

        Raises StageError at the end if an output that was asked for did not come.
        """
        seen = {TEXT}
        async with aclosing(self.server.stream(self.request)) as payloads:
            async for payload in payloads:
                seen.add(payload.kind)
                self.prompt_tokens += payload.meta.get("prompt_tokens", 0)
                self.tokens += payload.meta.get("tokens", 0)
                self.finish_reason = payload.meta.get("finish_reason") or self.finish_reason
                if payload.kind == TEXT:
                    if payload.data:
                        yield TEXT, payload.data
                elif payload.kind == AUDIO:
                    if data := await self._encoded(payload):
                        yield AUDIO, data
                elif payload.kind == IMAGE:
                    yield IMAGE, await asyncio.to_thread(encode_png, payload.data)
        if not self.sound.samples:
            seen.discard(AUDIO)
        elif data := await asyncio.to_thread(self.sound.finish):
            yield AUDIO, data
        for kind in self.request.outputs:
            if kind not in seen:
                stage = self.server.deployment.graph.outputs[kind].name
                raise StageError(f"Stage '{stage}' ended without giving any {kind}.", stage=stage)

    def usage(self, given: str, made: str) -> dict[str, int]:
        """The tokens that were counted, by a protocol's names for them."""
        return {given: self.prompt_tokens, made: self.tokens, "total_tokens": self.prompt_tokens + self.tokens}

    async def _encoded(self, payload: Payload) -> bytes:
        """The bytes that are ready after this sound. Codecs work in a thread; raw samples are not worth one."""
        if self.sound.format.codec == "pcm_s16le":
            return self.sound.push(payload.data, payload.meta["rate"])
        return await asyncio.to_thread(self.sound.push, payload.data, payload.meta["rate"])
