"""The messages of a chat body turned into a conversation: text as it is, pictures and sounds decoded in a thread.

Media come inside the body, as base64 or `data:` URIs, or lie in the folder that the server was started with. Nothing is ever fetched.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import unquote, urlsplit

import numpy as np

from vllm_omni.errors import RequestError, did_you_mean
from vllm_omni.payload import Payload, audio, image, text
from vllm_omni.request import Message
from vllm_omni.serving import audio as sound
from vllm_omni.serving import image as picture
from vllm_omni.serving.fields import Fields, Neutral, Silent
from vllm_omni.serving.gate import MAX_BODY

CONTAINERS = {"wav": "wav", "mp3": "mp3", "flac": "flac", "opus": "ogg", "ogg": "ogg", "aac": "aac"}
"""What a client calls a sound's format, and FFmpeg's name for its container. `pcm16` has none: 24 kHz, little-endian."""


class ChatMessage(Fields):
    """One turn. The fields of an assistant's turn may come back as we sent them, as far as they carry nothing but the text."""

    neutral: ClassVar[Neutral] = {
        "name": (), "audio": (), "refusal": ("",), "annotations": ([],), "tool_calls": ([],), "function_call": (), "tool_call_id": (),
        "images": ([],),
    }  # fmt: skip
    role: Literal["system", "developer", "user", "assistant"]
    content: Any


class _Part(Fields):
    silent: ClassVar[Silent] = {"prompt_cache_breakpoint": dict}
    type: str


class _Url(Fields):
    neutral: ClassVar[Neutral] = {"detail": ("auto",)}
    url: str


class _InputAudio(Fields):
    data: str
    format: Literal["wav", "mp3", "flac", "opus", "ogg", "aac", "pcm16"]


class _TextPart(_Part):
    text: str


class _ImagePart(_Part):
    image_url: _Url


class _AudioUrlPart(_Part):
    audio_url: _Url


class _InputAudioPart(_Part):
    input_audio: _InputAudio


PARTS: dict[str, type[_Part]] = {"text": _TextPart, "image_url": _ImagePart, "input_audio": _InputAudioPart, "audio_url": _AudioUrlPart}


async def conversation(messages: Sequence[ChatMessage], local: Path | None = None) -> tuple[Message, ...]:
    """The conversation; files below `local` may be named. Raises RequestError that names the message, the part and the remedy."""
    if not messages:
        raise RequestError("'messages' is empty: send at least one message.", param="messages")
    return tuple(
        [Message(message.role, await _content(message, f"messages[{turn}].content", local)) for turn, message in enumerate(messages)]
    )


async def _content(message: ChatMessage, path: str, local: Path | None) -> tuple[Payload, ...]:
    content = message.content
    if isinstance(content, str):
        parts = [text(content)]
    elif isinstance(content, list):
        parts = [await _payload(part, f"{path}[{index}]", local) for index, part in enumerate(content)]
    else:
        raise RequestError(f"'{path}' must be a string or an array of content parts.", param=path)
    if not any(part.data.strip() if isinstance(part.data, str) else True for part in parts):
        raise RequestError(f"'{path}' is empty: say something.", param=path)
    return tuple(parts)


async def _payload(data: Any, path: str, local: Path | None) -> Payload:
    kind = str(data.get("type")) if isinstance(data, dict) else ""
    if kind not in PARTS:
        raise RequestError(f"'{path}.type' is not a content part known here.{did_you_mean(kind, PARTS)}", param=f"{path}.type")
    part = PARTS[kind].of(data, path)
    return text(part.text) if isinstance(part, _TextPart) else await asyncio.to_thread(_media, part, path, local)


def _media(part: _Part, path: str, local: Path | None) -> Payload:
    match part:
        case _ImagePart():
            field = f"{path}.image_url.url"
            return image(picture.decode(data_uri(part.image_url.url, "image", field, local), field))
        case _AudioUrlPart():
            field = f"{path}.audio_url.url"
            return audio(*sound.decode(data_uri(part.audio_url.url, "audio", field, local), field))
        case _InputAudioPart():
            field = f"{path}.input_audio.data"
            raw = decode_base64(part.input_audio.data, field)
            name = part.input_audio.format
            return audio(*(_pcm16(raw, field) if name == "pcm16" else sound.decode(raw, field, CONTAINERS[name])))
    raise AssertionError(part)


def data_uri(url: str, family: str, field: str, local: Path | None = None) -> bytes:
    """The bytes of a base64 `data:` URI of a media type `family/…`, or of the file below `local` that a `file://` URL names.

    Raises RequestError that names `field`.
    """
    if url.startswith("file://"):
        return _local(url, field, local)
    head, comma, data = url.partition(",")
    if not comma or not head.startswith(f"data:{family}/") or not head.endswith(";base64"):
        message = f"'{field}' must begin with data:{family}/…;base64, and not with '{url[:60]}': this server fetches nothing."
        raise RequestError(message, param=field)
    return decode_base64(data, field)


def _local(url: str, field: str, folder: Path | None) -> bytes:
    if folder is None:
        said = f"'{field}' names a file, and this server was started without --allowed-local-media-path: send a data: URI."
        raise RequestError(said, param=field)
    place = urlsplit(url)
    path = Path(unquote(place.path))
    wrong = RequestError(f"'{field}' names no file that this server may read: they lie below its --allowed-local-media-path.", param=field)
    try:
        real = path.resolve(strict=True)
        if place.netloc not in ("", "localhost") or not real.is_relative_to(folder.resolve()) or not real.is_file():
            raise wrong
        if real.stat().st_size > MAX_BODY:
            raise RequestError(f"'{field}' names a file of more than {MAX_BODY >> 20} MiB.", param=field)
        return real.read_bytes()
    except (OSError, ValueError):  # ValueError: a null in the path
        raise wrong from None


def decode_base64(data: str, field: str) -> bytes:
    """Raises RequestError that names `field`."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise RequestError(f"'{field}' is not base64: {error}.", param=field) from None


def _pcm16(raw: bytes, field: str) -> tuple[sound.Samples, int]:
    if not raw or len(raw) % 2:
        raise RequestError(f"'{field}' must hold whole 16-bit samples, and has {len(raw)} bytes.", param=field)
    return (np.frombuffer(raw, "<i2") / np.float32(32768)).astype(np.float32), sound.PCM_RATE
