"""One answer while it is made: what the model gives, as it is or as the words and files that a client gets, and what is counted on the way.

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
    """The answer to a request; `sound` encodes its audio. What is counted is right when the chunks or parts have ended."""

    def __init__(self, server: Server, request: Request, sound: Encoder | None = None) -> None:
        self.server = server
        self.request = request
        self.sound = sound or Encoder("wav", whole=True)
        self.prompt_tokens = self.tokens = 0
        self.finish_reason = "stop"

    async def chunks(self) -> AsyncGenerator[Payload, None]:
        """What the model gives. Raises StageError at the end if an output that was asked for did not come; a preview is none."""
        seen = {TEXT}
        async with aclosing(self.server.stream(self.request)) as payloads:
            async for payload in payloads:
                if "partial" not in payload.meta and (payload.kind != AUDIO or len(payload.data)):
                    seen.add(payload.kind)
                self.prompt_tokens += payload.meta.get("prompt_tokens", 0)
                self.tokens += payload.meta.get("tokens", 0)
                self.finish_reason = payload.meta.get("finish_reason") or self.finish_reason
                yield payload
        for kind in self.request.outputs:
            if kind not in seen:
                stage = self.server.deployment.graph.outputs[kind].name
                raise StageError(f"Stage '{stage}' ended without giving any {kind}.", stage=stage)

    async def parts(self) -> AsyncGenerator[tuple[Kind, Any], None]:
        """What a client gets, piece by piece: text as str, sound and pictures as the bytes of a file. Previews are left out."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.kind == TEXT:
                    if chunk.data:
                        yield TEXT, chunk.data
                elif chunk.kind == AUDIO:
                    if data := await self._encoded(chunk):
                        yield AUDIO, data
                elif chunk.kind == IMAGE and "partial" not in chunk.meta:
                    yield IMAGE, await asyncio.to_thread(encode_png, chunk.data)
        if self.sound.samples and (data := await asyncio.to_thread(self.sound.finish)):
            yield AUDIO, data

    def usage(self, given: str, made: str) -> dict[str, int]:
        """The tokens that were counted, by a protocol's names for them."""
        return {given: self.prompt_tokens, made: self.tokens, "total_tokens": self.prompt_tokens + self.tokens}

    async def _encoded(self, payload: Payload) -> bytes:
        """The bytes that are ready after this sound. Codecs work in a thread; raw samples are not worth one."""
        if self.sound.format.codec == "pcm_s16le":
            return self.sound.push(payload.data, payload.meta["rate"])
        return await asyncio.to_thread(self.sound.push, payload.data, payload.meta["rate"])
