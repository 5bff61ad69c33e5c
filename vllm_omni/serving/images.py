"""`/v1/images/generations` and `/v1/images/edits`: words, and pictures, to pictures, in OpenAI's shape.

Whole, as base64 or as links to this server, or as server-sent events, with previews of models that have any. How many pictures, of
which size, with how many previews is up to the model's own parameters, and so is every setting that OpenAI does not have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from vllm_omni.errors import RequestError
from vllm_omni.hookspecs import hookimpl
from vllm_omni.payload import IMAGE, Payload, image, text
from vllm_omni.request import Message, Request, new_id
from vllm_omni.serving import image as picture
from vllm_omni.serving.answer import Answer
from vllm_omni.serving.fields import Body, Fields, Neutral, Silent
from vllm_omni.serving.files import Files
from vllm_omni.serving.form import TYPES, Upload, read_body
from vllm_omni.serving.gate import OPEN_BELOW
from vllm_omni.serving.messages import data_uri
from vllm_omni.serving.reply import EVENTS, Reply, event
from vllm_omni.serving.server import Server

MAX_INPUTS = 16
"""Pictures that an edit may bring. A model may take fewer and says so itself."""


class ImageBody(Body):
    """The fields that both kinds of request have. `model` may be left out: one model is served."""

    silent: ClassVar[Silent] = {"user": str, "safety_identifier": str}
    neutral: ClassVar[Neutral] = {
        "n": (1,), "size": ("auto",), "partial_images": (0,), "quality": ("auto", "standard"), "background": ("auto", "opaque"),
        "complexity": (), "frame_count": (), "frame_duration_ms": (), "svg": (),
    }  # fmt: skip
    parameters = frozenset({"n", "size", "partial_images"})
    unset: ClassVar[Neutral] = {"size": ("auto",)}

    model: str | None = None
    prompt: str
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None


class GenerationBody(ImageBody):
    neutral: ClassVar[Neutral] = {**ImageBody.neutral, "style": ("vivid",), "moderation": ("auto", "low")}


class EditBody(ImageBody):
    """`image` is a file or several of a form, or `data:` URIs; `images`, in JSON, has OpenAI's objects, too."""

    neutral: ClassVar[Neutral] = {**ImageBody.neutral, "mask": (), "markup": (), "input_fidelity": ("low",)}

    image: Any = None
    images: Any = None


class _Reference(Fields):
    """A picture of an edit in JSON."""

    neutral: ClassVar[Neutral] = {"file_id": ()}
    image_url: str


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    router = APIRouter()
    graph, served = server.deployment.graph, server.deployment.served_name
    files = Files()

    def reply(http: HttpRequest, body: ImageBody, params: dict[str, Any], family: str, given: tuple[Payload, ...]) -> Reply:
        if IMAGE not in graph.outputs:
            raise RequestError(f"The model '{served}' gives no pictures.", param="model")
        if not body.prompt.strip():
            raise RequestError("'prompt' is empty: say what the picture shows.", param="prompt")
        if (body.output_format or "png") == "png" and body.output_compression not in (None, 100):
            raise RequestError("'output_compression' is for 'output_format' jpeg and webp: PNG loses nothing.", param="output_compression")
        if body.stream and body.response_format == "url":
            raise RequestError("'response_format' must be b64_json in a stream: events bring the pictures.", param="response_format")
        if params.get("partial_images") and not body.stream:
            raise RequestError("'partial_images' needs 'stream': true.", param="partial_images")
        said = Message("user", (text(body.prompt), *given))
        painting = Painting(server, Request(messages=(said,), outputs=(IMAGE,), params=params, id=new_id("image")), body)
        if body.stream:
            return Reply(painting.events(family), EVENTS)
        links = f"{str(http.base_url).rstrip('/')}{OPEN_BELOW}" if body.response_format == "url" else None
        return Reply(painting.whole(files, links), "application/json", whole=True)

    @router.post("/v1/images/generations", openapi_extra=GenerationBody.schema_for(graph.params, *TYPES))
    async def images_generations(http: HttpRequest) -> Reply:
        """Make pictures from words."""
        body, params = GenerationBody.read(await read_body(http), graph.params)
        server.check_model(body.model)
        return reply(http, body, params, "image_generation", ())

    @router.post("/v1/images/edits", openapi_extra=EditBody.schema_for(graph.params, *TYPES))
    async def images_edits(http: HttpRequest) -> Reply:
        """Make pictures from words and pictures."""
        body, params = EditBody.read(await read_body(http), graph.params)
        server.check_model(body.model)
        if IMAGE not in graph.takes:
            raise RequestError(f"The model '{served}' takes no pictures: use /v1/images/generations.", param="model")
        given = await asyncio.to_thread(lambda: tuple(image(picture.decode(data, field)) for data, field in _inputs(body, server.media)))
        return reply(http, body, params, "image_edit", given)

    @router.get(OPEN_BELOW + "{name}", include_in_schema=False)  # an answer gives the link; there is nothing to call it with
    async def images_file(name: str) -> Response:
        data = await asyncio.to_thread(files.read, name)
        return Response(data, media_type=f"image/{name.rpartition('.')[2]}")

    return [router]


def _inputs(body: EditBody, local: Path | None) -> list[tuple[bytes, str]]:
    """The files of the pictures, each with the field that it came in."""
    found = []
    for name, given in (("image", body.image), ("images", body.images)):
        several = given if isinstance(given, list) else [] if given is None else [given]
        found += [(one, f"{name}[{index}]" if isinstance(given, list) else name) for index, one in enumerate(several)]
    if not found:
        raise RequestError("'image' is required: a file of a form, or a data: URI.", param="image")
    if len(found) > MAX_INPUTS:
        raise RequestError(f"'image' has {len(found)} pictures: send at most {MAX_INPUTS}.", param="image")
    return [(_file(one, field, local), field) for one, field in found]


def _file(given: Any, field: str, local: Path | None) -> bytes:
    if isinstance(given, Upload):
        return given.data
    if isinstance(given, dict):
        given, field = _Reference.of(given, field).image_url, f"{field}.image_url"
    if not isinstance(given, str):
        raise RequestError(f"'{field}' must be a file of a form, or a data: URI.", param=field)
    return data_uri(given, "image", field, local)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as a file, `size` as WIDTHxHEIGHT. `index` is that of the sample, `partial` that of a preview of it."""

    data: bytes
    size: str
    index: int
    partial: int | None
    told: dict[str, Any]
    """What the model said of it: its `seed`."""


class Painting(Answer):
    """The pictures of one request while they are made."""

    def __init__(self, server: Server, request: Request, body: ImageBody) -> None:
        super().__init__(server, request)
        self.format = body.output_format or "png"
        self.quality = 100 if body.output_compression is None else body.output_compression

    async def pictures(self) -> AsyncGenerator[Picture, None]:
        """The pictures and previews as they come. A fault of the conversation is one of the prompt, in these protocols."""
        count = 0
        try:
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    if chunk.kind != IMAGE:
                        continue
                    data = await asyncio.to_thread(picture.encode, chunk.data, self.format, self.quality)
                    partial = chunk.meta.get("partial")
                    told = {"seed": chunk.meta["seed"]} if "seed" in chunk.meta else {}
                    yield Picture(data, f"{chunk.data.shape[1]}x{chunk.data.shape[0]}", chunk.meta.get("index", count), partial, told)
                    count += partial is None
        except RequestError as error:
            if error.param != "messages":
                raise
            raise RequestError(error.message, param="prompt") from None

    async def whole(self, files: Files, links: str | None) -> AsyncGenerator[bytes, None]:
        """The answer as JSON, in one piece. With `links`, the URL that the files are below, the pictures are kept there."""
        async with aclosing(self.pictures()) as pictures:
            made = sorted([one async for one in pictures if one.partial is None], key=lambda one: one.index)
        if links is None:
            data = [{"b64_json": one.data, **one.told} for one in made]
        else:
            names = [await asyncio.to_thread(files.keep, one.data, self.format) for one in made]
            data = [{"url": links + name, **one.told} for name, one in zip(names, made, strict=True)]
        head = {"created": int(time.time()), "background": "opaque", "output_format": self.format, "size": made[0].size}
        yield msgspec.json.encode({**head, "data": data, **({"usage": self._usage()} if self.prompt_tokens or self.tokens else {})})

    async def events(self, family: str) -> AsyncGenerator[bytes, None]:
        """OpenAI's events, `image_generation.…` or `image_edit.…`; `index` and `seed` are ours.

        Usage is there always, as clients rely on it: 0 if the model counts no tokens.
        """
        same = {"created_at": int(time.time()), "background": "opaque", "output_format": self.format, "quality": "auto"}
        async with aclosing(self.pictures()) as pictures:
            async for one in pictures:
                ours = {"index": one.index, **one.told}
                more = {"usage": self._usage()} if one.partial is None else {"partial_image_index": one.partial}
                kind = f"{family}.{'completed' if one.partial is None else 'partial_image'}"
                body = {"type": kind, "b64_json": one.data, "size": one.size, **same, **more, **ours}
                yield b"event: %s\n%s" % (kind.encode(), event(body))

    def _usage(self) -> dict[str, Any]:
        """OpenAI's fields. Models do not tell words from pictures: all tokens of the input count as text."""
        details = {"image_tokens": 0, "text_tokens": self.prompt_tokens}
        return {**self.usage("input_tokens", "output_tokens"), "input_tokens_details": details}
