"""`/v1/chat/completions`, whole or as server-sent events, in OpenAI's shape. One choice.

Text beside sound is its transcript and stands in `message.audio`, as OpenAI has it; pictures stand in `message.images`. Sound is
WAV unless `audio.format` says otherwise, and is not stored: a later turn cannot refer to it by its id.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from fastapi import Request as HttpRequest

from vllm_omni.errors import RequestError, StageError, did_you_mean
from vllm_omni.graph import StageGraph
from vllm_omni.hookspecs import hookimpl
from vllm_omni.payload import AUDIO, IMAGE, PUBLIC_KINDS, TEXT, Kind
from vllm_omni.request import Message, Request, new_id
from vllm_omni.serving.audio import encoder, finish, push
from vllm_omni.serving.fields import Body, Fields, Neutral, Silent, VoiceName, checked
from vllm_omni.serving.image import encode_png
from vllm_omni.serving.messages import ChatMessage, conversation
from vllm_omni.serving.reply import Reply, Stream, Whole, error_event, event
from vllm_omni.serving.server import Server

CARRIED = (TEXT, AUDIO, IMAGE)
"""The kinds that a chat message can hold."""


class AudioOptions(Fields):
    voice: VoiceName | None = None
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"] = "wav"


class StreamOptions(Fields):
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False,)}
    include_usage: bool | None = False


class ChatBody(Body):
    """The fields of a chat completion. `model` may be left out: one model is served."""

    silent: ClassVar[Silent] = {
        "user": str, "metadata": dict, "store": bool, "service_tier": str, "safety_identifier": str, "prompt_cache_key": str,
        "prompt_cache_retention": str, "prompt_cache_options": dict, "parallel_tool_calls": bool,
    }  # fmt: skip
    neutral: ClassVar[Neutral] = {
        "n": (1,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
        "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},), "stop": ([],), "logit_bias": ({},),
        "reasoning_effort": ("none",), "verbosity": ("medium",), "prediction": (), "moderation": (), "web_search_options": (),
        "frequency_penalty": (0,), "presence_penalty": (0,),
    }  # fmt: skip
    parameters = frozenset({"temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "frequency_penalty", "presence_penalty"})
    renamed: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}

    model: str | None = None
    messages: list[ChatMessage]
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    router = APIRouter()
    declared = server.deployment.graph.params

    @router.post("/v1/chat/completions", openapi_extra=ChatBody.schema_for(declared))
    async def chat_completions(http: HttpRequest) -> Reply:
        """Answer a conversation."""
        body, params = ChatBody.read(await http.body(), declared)
        server.check_model(body.model)
        if body.stream_options and not body.stream:
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")
        graph = server.deployment.graph
        outputs = _outputs(graph, body.modalities)
        audio = body.audio or AudioOptions()
        if body.audio and AUDIO not in outputs:
            raise RequestError("'audio' needs \"audio\" among the 'modalities'.", param="audio")
        if audio.voice is not None:
            if "voice" in params:
                raise RequestError("'voice' is given twice: in 'audio' and beside it.", param="audio.voice")
            params["voice"] = checked(declared, "voice", audio.voice, "audio.voice")
        messages = await conversation(body.messages)
        request = Request(messages=messages, outputs=_with_transcript(graph, outputs, messages), params=params, id=new_id("chatcmpl"))
        answer = Answer(server, request, outputs, audio.format)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return Stream(answer.events(usage), "text/event-stream; charset=utf-8", error_event)
        return Whole(answer.whole, "application/json")

    return [router]


def _outputs(graph: StageGraph, modalities: list[str] | None) -> tuple[Kind, ...]:
    """The kinds asked for; by default text, or all that a model without text gives."""
    if modalities is None:
        return (TEXT,) if TEXT in graph.outputs else tuple(graph.outputs)
    known = [kind.name for kind in CARRIED if kind in graph.outputs]
    for index, name in enumerate(modalities):
        if name not in known:
            message = f"'modalities[{index}]' is '{name}', which this model does not give in a chat.{did_you_mean(name, known)}"
            raise RequestError(message, param="modalities")
    if not modalities:
        raise RequestError(f"'modalities' is empty: leave it out, or choose from {', '.join(known)}.", param="modalities")
    return tuple(dict.fromkeys(PUBLIC_KINDS[name] for name in modalities))


def _with_transcript(graph: StageGraph, outputs: tuple[Kind, ...], messages: tuple[Message, ...]) -> tuple[Kind, ...]:
    """The outputs to ask for: sound brings its transcript along when the text is made on the way to it anyway."""
    if AUDIO not in outputs or TEXT in outputs or TEXT not in graph.outputs:
        return outputs
    route = graph.route(outputs, {part.kind for message in messages for part in message.content})
    return (*outputs, TEXT) if graph.outputs[TEXT] in route.stages else outputs


class Answer:
    """One answer while it is made. `outputs` are the kinds the client asked for."""

    def __init__(self, server: Server, request: Request, outputs: tuple[Kind, ...], audio_format: str) -> None:
        self._server = server
        self._request = request
        self._outputs = outputs
        self._spoken = AUDIO in outputs
        self._raw = audio_format == "pcm16"
        self._format = "pcm" if self._raw else audio_format
        self._created = int(time.time())
        self._prompt_tokens = self._tokens = 0
        self._finish_reason = "stop"

    async def whole(self) -> bytes:
        """The completion as JSON."""
        text: list[str] = []
        sound: list[bytes] = []
        images: list[dict[str, Any]] = []
        async with aclosing(self._parts(whole=True)) as parts:
            async for kind, data in parts:
                if kind == TEXT:
                    text.append(data)
                elif kind == AUDIO:
                    sound.append(data)
                else:
                    images.append(_picture(data, len(images)))
        said = "".join(text)
        content = said if TEXT in self._outputs and not self._spoken else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._spoken:
            audio = {"data": base64.b64encode(b"".join(sound)).decode(), "transcript": said}
            message["audio"] = {"id": new_id("audio"), **audio, "expires_at": self._created}
        if images:
            message["images"] = images
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish_reason}
        return msgspec.json.encode({**self._head("chat.completion"), "choices": [choice], "usage": self._usage()})

    async def events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events. The first comes with the first part, so that an early error can still be a status."""
        head = msgspec.json.encode(self._head("chat.completion.chunk"))[:-1]
        usage = b',"usage":null' if include_usage else b""

        def chunk(delta: bytes, reason: bytes = b"null") -> bytes:
            choice = b'{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":' + reason + b"}"
            return b"data: " + head + b',"choices":[' + choice + b"]" + usage + b"}\n\n"

        role: dict[str, Any] = {"role": "assistant", "content": None if self._spoken else "", "refusal": None}
        if self._spoken:
            role["audio"] = {"id": new_id("audio"), "transcript": ""}
        opening = chunk(msgspec.json.encode(role))
        pictures = 0
        async with aclosing(self._parts(whole=False)) as parts:
            async for kind, data in parts:
                if kind == TEXT:
                    said = msgspec.json.encode(data)
                    delta = b'{"audio":{"transcript":' + said + b"}}" if self._spoken else b'{"content":' + said + b"}"
                elif kind == AUDIO:
                    delta = b'{"audio":{"data":"' + base64.b64encode(data) + b'"}}'
                else:
                    delta = msgspec.json.encode({"images": [_picture(data, pictures)]})
                    pictures += 1
                yield opening + chunk(delta)
                opening = b""
        ending = chunk(msgspec.json.encode({"audio": {"expires_at": self._created}})) if self._spoken else b""
        ending += chunk(b"{}", msgspec.json.encode(self._finish_reason))
        if include_usage:
            ending += event(head + b',"choices":[],"usage":' + msgspec.json.encode(self._usage()) + b"}")
        yield opening + ending + event(b"[DONE]")

    async def _parts(self, whole: bool) -> AsyncGenerator[tuple[Kind, Any], None]:
        """What a client gets, piece by piece: text as str, sound and pictures as the bytes of a file. Counts on the way."""
        sound = encoder(self._format, whole=whole)
        seen: set[Kind] = {TEXT}
        async with aclosing(self._server.stream(self._request)) as payloads:
            async for payload in payloads:
                seen.add(payload.kind)
                if payload.kind == TEXT:
                    self._count(payload.meta)
                    if payload.data:
                        yield TEXT, payload.data
                elif payload.kind == AUDIO:
                    if data := await push(sound, payload):
                        yield AUDIO, data
                elif payload.kind == IMAGE:
                    yield IMAGE, await asyncio.to_thread(encode_png, payload.data)
        if data := await finish(sound):
            yield AUDIO, data
        if not sound.samples:
            seen.discard(AUDIO)
        for kind in self._outputs:
            if kind not in seen:
                stage = self._server.deployment.graph.outputs[kind].name
                raise StageError(f"Stage '{stage}' ended without giving any {kind}.", stage=stage)

    def _count(self, meta: Any) -> None:
        self._tokens += meta.get("tokens", 0)
        self._prompt_tokens += meta.get("prompt_tokens", 0)
        self._finish_reason = meta.get("finish_reason") or self._finish_reason

    def _head(self, kind: str) -> dict[str, Any]:
        served = self._server.deployment.served_name
        return {"id": self._request.id, "object": kind, "created": self._created, "model": served}

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}


def _picture(png: bytes, index: int) -> dict[str, Any]:
    return {"type": "image_url", "index": index, "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}
