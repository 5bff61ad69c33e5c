"""`/v1/chat/completions`, whole or as server-sent events, in OpenAI's shape. One choice.

Text beside sound is its transcript and stands in `message.audio`, as OpenAI has it; pictures stand in `message.images`. Sound is
WAV unless `audio.format` says otherwise, and is not stored: a later turn cannot refer to it by its id.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from fastapi import Request as HttpRequest

from vllm_omni.errors import RequestError, did_you_mean
from vllm_omni.graph import StageGraph
from vllm_omni.hookspecs import hookimpl
from vllm_omni.payload import AUDIO, IMAGE, TEXT, Kind
from vllm_omni.request import Message, Request, new_id
from vllm_omni.serving.answer import Answer
from vllm_omni.serving.audio import Encoder
from vllm_omni.serving.fields import Body, Fields, Neutral, Silent, VoiceName, checked
from vllm_omni.serving.messages import ChatMessage, conversation
from vllm_omni.serving.reply import EVENTS, Reply, event
from vllm_omni.serving.server import Server

TOKENS = ("prompt_tokens", "completion_tokens")


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
    parameters = frozenset(
        {"temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "frequency_penalty", "presence_penalty", "stop"}
    )
    renamed: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}
    listed = frozenset({"stop"})

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
        messages = await conversation(body.messages, server.media)
        request = Request(messages=messages, outputs=_with_transcript(graph, outputs, messages), params=params, id=new_id("chatcmpl"))
        sound = Encoder("pcm" if audio.format == "pcm16" else audio.format, whole=not body.stream)
        completion = Completion(server, request, sound)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return Reply(completion.events(usage), EVENTS)
        return Reply(completion.whole(), "application/json", whole=True)

    return [router]


def _outputs(graph: StageGraph, modalities: list[str] | None) -> tuple[Kind, ...]:
    """The kinds asked for; by default text, or all that a model without text gives."""
    known = {kind.name: kind for kind in (TEXT, AUDIO, IMAGE) if kind in graph.outputs}
    if modalities is None:
        modalities = ["text"] if "text" in known else list(known)
    for index, name in enumerate(modalities):
        if name not in known:
            message = f"'modalities[{index}]' is '{name}', which this model does not give in a chat.{did_you_mean(name, known)}"
            raise RequestError(message, param="modalities")
    if not modalities:
        raise RequestError(f"'modalities' is empty; what this model gives in a chat: {', '.join(known) or 'nothing'}.", param="modalities")
    return tuple(dict.fromkeys(known[name] for name in modalities))


def _with_transcript(graph: StageGraph, outputs: tuple[Kind, ...], messages: tuple[Message, ...]) -> tuple[Kind, ...]:
    """The outputs to ask for: sound brings its transcript along when the text is made on the way to it anyway."""
    if AUDIO not in outputs or TEXT in outputs or TEXT not in graph.outputs:
        return outputs
    route = graph.route(outputs, {part.kind for message in messages for part in message.content})
    return (*outputs, TEXT) if graph.outputs[TEXT] in route.stages else outputs


class Completion(Answer):
    """An answer as a chat has it."""

    async def whole(self) -> AsyncGenerator[bytes, None]:
        """The completion as JSON, in one piece."""
        head = self._head("chat.completion")
        spoken = AUDIO in self.request.outputs
        made: dict[Kind, list[Any]] = {TEXT: [], AUDIO: [], IMAGE: []}
        async with aclosing(self.parts()) as parts:
            async for kind, data in parts:
                made[kind].append(data)
        said = "".join(made[TEXT])
        content = said if TEXT in self.request.outputs and not spoken else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if spoken:
            sound = b"".join(made[AUDIO])
            message["audio"] = {"id": new_id("audio"), "data": sound, "transcript": said, "expires_at": head["created"]}
        if made[IMAGE]:
            message["images"] = [_picture(png, index) for index, png in enumerate(made[IMAGE])]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        yield msgspec.json.encode({**head, "choices": [choice], "usage": self.usage(*TOKENS)})

    async def events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events. The first comes with the first part, so that an early error can still be a status."""
        head = self._head("chat.completion.chunk")
        spoken = AUDIO in self.request.outputs
        no_usage = {"usage": None} if include_usage else {}

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return event({**head, "choices": [choice], **no_usage})

        role: dict[str, Any] = {"role": "assistant", "content": None if spoken else "", "refusal": None}
        if spoken:
            role["audio"] = {"id": new_id("audio"), "transcript": ""}
        opening = chunk(role)
        pictures = 0
        async with aclosing(self.parts()) as parts:
            async for kind, data in parts:
                if kind == TEXT:
                    delta = {"audio": {"transcript": data}} if spoken else {"content": data}
                elif kind == AUDIO:
                    delta = {"audio": {"data": data}}
                else:
                    delta = {"images": [_picture(data, pictures)]}
                    pictures += 1
                yield opening + chunk(delta)
                opening = b""
        ending = chunk({"audio": {"expires_at": head["created"]}}) if spoken else b""
        ending += chunk({}, self.finish_reason)
        if include_usage:
            ending += event({**head, "choices": [], "usage": self.usage(*TOKENS)})
        yield opening + ending + b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        served = self.server.deployment.served_name
        return {"id": self.request.id, "object": kind, "created": int(time.time()), "model": served}


def _picture(png: bytes, index: int) -> dict[str, Any]:
    return {"type": "image_url", "index": index, "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}
