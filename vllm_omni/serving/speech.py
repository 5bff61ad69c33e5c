"""`/v1/audio/speech`: text to a sound file, in OpenAI's shape.

Whole, with its length, by default; in pieces as they are made with `stream` (ours) or OpenAI's `stream_format`. Raw `pcm` is
24 kHz, 16-bit little-endian, one channel, unless `sample_rate` (ours) says otherwise; other formats tell their rate themselves.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from vllm_omni.errors import RequestError
from vllm_omni.hookspecs import hookimpl
from vllm_omni.payload import AUDIO, text
from vllm_omni.request import Message, Request, new_id
from vllm_omni.serving.answer import Answer
from vllm_omni.serving.audio import Encoder
from vllm_omni.serving.fields import Body, Neutral, VoiceName, checked
from vllm_omni.serving.reply import EVENTS, Reply, event
from vllm_omni.serving.server import Server

MAX_INPUT = 16_384
"""Characters of the longest input. OpenAI allows 4,096; a model may allow less than this and says so itself."""


class SpeechBody(Body):
    """The fields of a speech request. `model` may be left out: one model is served."""

    neutral: ClassVar[Neutral] = {"speed": (1,), "instructions": ("",)}
    parameters = frozenset({"speed", "instructions"})

    model: str | None = None
    input: str
    voice: VoiceName | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    sample_rate: int | None = None
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    router = APIRouter()
    declared = server.deployment.graph.params

    @router.post("/v1/audio/speech", openapi_extra=SpeechBody.schema_for(declared))
    async def audio_speech(http: HttpRequest) -> Reply:
        """Say a text."""
        body, params = SpeechBody.read(await http.body(), declared)
        server.check_model(body.model)
        if AUDIO not in server.deployment.graph.outputs:
            raise RequestError(f"The model '{server.deployment.served_name}' gives no audio.", param="model")
        if not body.input.strip():
            raise RequestError("'input' is empty: say something.", param="input")
        if len(body.input) > MAX_INPUT:
            raise RequestError(f"'input' has {len(body.input)} characters: send at most {MAX_INPUT} at a time.", param="input")
        if body.stream is False and body.stream_format:
            raise RequestError("'stream' is false and 'stream_format' given: leave one of them out.", param="stream_format")
        if body.voice is not None:
            params["voice"] = checked(declared, "voice", body.voice, "voice")
        streamed = bool(body.stream or body.stream_format)
        sound = Encoder(body.response_format, body.sample_rate, whole=not streamed)
        said = Message("user", (text(body.input, verbatim=True),))
        speech = Speech(server, Request(messages=(said,), outputs=(AUDIO,), params=params, id=new_id("speech")), sound)
        if body.stream_format == "sse":
            return Reply(speech.events(), EVENTS)
        return Reply(speech.pieces(), sound.format.media_type, whole=not streamed)

    return [router]


class Speech(Answer):
    """One sound while it is made."""

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The bytes of the file as they are ready."""
        async with aclosing(self.parts()) as parts:
            async for _, data in parts:
                yield data

    async def events(self) -> AsyncGenerator[bytes, None]:
        """OpenAI's `speech.audio.delta` events and the closing `speech.audio.done`."""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                yield event({"type": "speech.audio.delta", "audio": piece})
        yield event({"type": "speech.audio.done", "usage": self.usage("input_tokens", "output_tokens")})
