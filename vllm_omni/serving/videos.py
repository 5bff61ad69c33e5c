"""`/v1/videos`: words, and a picture or a video to go on from, to a video, in OpenAI's shape.

A video is a job, which goes on without its client and whose file is kept for a day; with `/v1/videos/sync` it is the answer. How
long it is, of which size, in how many steps is up to the model's own parameters, and so is every setting that OpenAI does not have.
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field
from starlette.responses import FileResponse, Response

from vllm_omni.errors import NotFoundError, RequestError
from vllm_omni.hookspecs import hookimpl
from vllm_omni.payload import PROGRESS, VIDEO, Payload, image, text, video
from vllm_omni.request import Message, Request, new_id
from vllm_omni.serving import image as picture
from vllm_omni.serving import video as film
from vllm_omni.serving.answer import Answer
from vllm_omni.serving.fields import Body, Fields, Neutral, decode_json
from vllm_omni.serving.form import TYPES, Form, Upload, read_body
from vllm_omni.serving.jobs import Job, Live
from vllm_omni.serving.messages import data_uri
from vllm_omni.serving.reply import Reply
from vllm_omni.serving.server import Server

LATER = (
    "generate_sound", "action", "action_chunk_size", "action_mode", "action_path", "domain_name", "image_size", "raw_action_dim",
    "view_point",
)  # fmt: skip
"""What clients of other servers ask for, and no model here gives yet."""


def _number(value: Any) -> Any:
    """OpenAI's seconds are a string."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class VideoBody(Body):
    """The fields of a request. `model` may be left out: one model is served. `input_reference` is a file of a form, or an object."""

    neutral: ClassVar[Neutral] = {"n": (1,), **dict.fromkeys(LATER, ()), "generate_sound": (False,)}
    parameters = frozenset({"n", "size"})

    model: str | None = None
    prompt: str
    input_reference: Any = None
    seconds: Annotated[float, Field(gt=0, le=3_600), BeforeValidator(_number)] | None = None
    output_format: Literal["mp4", "webm"] | None = None


class _Reference(Fields):
    """What to go on from, in JSON. `video_url` is ours."""

    neutral: ClassVar[Neutral] = {"file_id": ()}
    image_url: str | None = None
    video_url: str | None = None


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    if server.jobs is None:
        return []
    router, jobs, graph = APIRouter(), server.jobs, server.deployment.graph

    async def asked(http: HttpRequest, *more: Any) -> Filming:
        """The video that a request is for."""
        body, params = _read(await read_body(http), server)
        server.check_model(body.model)
        server.check_ready()
        given = await asyncio.to_thread(_given, body.input_reference, server.media)
        for part in given:
            if part.kind not in graph.takes:
                raise RequestError(f"The model '{server.deployment.served_name}' takes no {part.kind}.", param="input_reference")
        said = Message("user", (text(body.prompt), *given))
        outputs = tuple(kind for kind in (VIDEO, *more) if kind in graph.outputs)
        return Filming(server, Request(messages=(said,), outputs=outputs, params=params, id=new_id("video")), body)

    @router.post("/v1/videos", openapi_extra=VideoBody.schema_for(graph.params, *TYPES))
    async def videos_create(http: HttpRequest) -> Response:
        """Begin to make a video."""
        filming = await asked(http, PROGRESS)
        return _answer(_shown(await jobs.start(Job(filming.request.id, filming.about()), filming)))

    @router.post("/v1/videos/sync", openapi_extra=VideoBody.schema_for(graph.params, *TYPES))
    async def videos_sync(http: HttpRequest) -> Reply:
        """Make a video: the answer is its file."""
        filming = await asked(http)
        return Reply(filming.whole(), filming.encoder.format.media_type, whole=True)

    @router.get("/v1/videos")
    async def videos_list(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20, order: Literal["asc", "desc"] = "desc"
    ) -> Response:
        """The jobs, the newest first."""
        page, more = await jobs.page(after, limit, newest=order == "desc")
        data = [_shown(job) for job in page]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return _answer({"object": "list", "data": data, **ends, "has_more": more})

    @router.get("/v1/videos/{name}")
    async def videos_retrieve(name: str) -> Response:
        """What is known of a job."""
        return _answer(_shown(await jobs.get(name)))

    @router.delete("/v1/videos/{name}")
    async def videos_delete(name: str) -> Response:
        """Remove a job and its file; abort it first if it is under way."""
        await jobs.remove(name)
        return _answer({"id": name, "object": "video.deleted", "deleted": True})

    @router.get("/v1/videos/{name}/content")
    async def videos_content(name: str, variant: str = "video") -> Response:
        """The file; as it grows while the job is under way."""
        if variant != "video":
            raise RequestError(f"'variant' must be video, not '{variant[:100]}': nothing else is made.", param="variant")
        found = await jobs.get(name)
        media_type = film.FORMATS[_job(found).about["format"]].media_type
        if isinstance(found, Live) and not found.over:
            return Reply(found.follow(), media_type)
        job = _job(found)
        if job.error:
            raise NotFoundError(f"The video '{name}' has no content: it failed. {job.error['message']}")
        return FileResponse(jobs.store.path(job), media_type=media_type)

    return [router]


def _answer(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _job(found: Job | Live) -> Job:
    return found.job if isinstance(found, Live) else found


def _shown(found: Job | Live) -> dict[str, Any]:
    """OpenAI's object of a video; `seed`, `fps` and `num_frames` are ours."""
    job = _job(found)
    progress = 100 if job.status == "completed" else found.work.progress if isinstance(found, Live) else 0
    about = {name: value for name, value in job.about.items() if name != "format"}
    times = {"created_at": job.created_at, "completed_at": job.completed_at, "expires_at": job.expires_at}
    head = {"id": job.id, "object": "video", "status": job.status, "progress": progress, **times}
    return {**head, "error": job.error, "remixed_from_video_id": None, **about}


def _read(raw: bytes | Form, server: Server) -> tuple[VideoBody, dict[str, Any]]:
    """The protocol's fields, and the model's parameters. Raises RequestError."""
    declared = server.deployment.graph.params
    if isinstance(raw, Form):  # an object in a form, as OpenAI's client writes it
        inner = {key: raw.pop(f"input_reference[{key}]") for key in _Reference.known() if f"input_reference[{key}]" in raw}
        if inner:
            raw["input_reference"] = msgspec.json.encode(inner).decode()
    try:
        body, params = VideoBody.read(raw, declared)
    except RequestError as error:
        if (error.param or "").rpartition(".")[2] not in LATER:
            raise
        raise RequestError(f"'{error.param}' is not supported yet: leave it out.", param=error.param) from None
    if not body.prompt.strip():
        raise RequestError("'prompt' is empty: say what the video shows.", param="prompt")
    if params.get("n", 1) > 1:
        raise RequestError(f"'n' must be 1, not {params['n']}: a job makes one video. Send {params['n']} requests.", param="n")
    if body.seconds is not None:
        if "num_frames" in params:
            raise RequestError("'seconds' and 'num_frames' both say how long the video is: give one of them.", param="seconds")
        if "num_frames" not in declared:
            raise RequestError("'seconds' has no effect on this model: leave it out.", param="seconds")
        fps = _settings(server, params).get("fps") or 24.0
        frames = round(body.seconds * fps) + 1  # both ends: what encoders of video that look back only have a length for
        try:
            params["num_frames"] = declared["num_frames"].check(frames)
        except RequestError as error:
            raise RequestError(f"'seconds' makes {frames} frames at {fps:g} a second. {error.message}", param="seconds") from None
    return body, params


def _settings(server: Server, params: dict[str, Any]) -> dict[str, Any]:
    """What holds for a request, by name, as far as it is known before it runs."""
    deployment = server.deployment
    return {**{name: param.default for name, param in deployment.graph.params.items()}, **deployment.recipe.defaults, **params}


def _given(reference: Any, local: Path | None) -> tuple[Payload, ...]:
    """The picture or the video to go on from, decoded."""
    field = "input_reference"
    if reference is None or reference == "":
        return ()
    if isinstance(reference, Upload):
        kind = reference.media_type.partition("/")[0]
        kind = kind if kind in ("image", "video") else (mimetypes.guess_type(reference.filename)[0] or "").partition("/")[0]
        return (_decoded(reference.data, field, kind),)
    if isinstance(reference, str):
        named = "video_url" if reference.startswith("data:video/") else "image_url"
        reference = decode_json(reference.encode()) if reference.startswith("{") else {named: reference}
    if not isinstance(reference, dict):
        raise RequestError(f"'{field}' must be a file of a form, or an object with a data: URI in 'image_url'.", param=field)
    told = _Reference.of(reference, field)
    urls = [(name, url) for name, url in (("image", told.image_url), ("video", told.video_url)) if url is not None]
    if len(urls) != 1:
        raise RequestError(f"'{field}' must have one of 'image_url' and 'video_url'.", param=field)
    [(kind, url)] = urls
    return (_decoded(data_uri(url, kind, f"{field}.{kind}_url", local), f"{field}.{kind}_url", kind),)


def _decoded(data: bytes, field: str, kind: str) -> Payload:
    if kind == "image" or (kind != "video" and picture.readable(data)):
        return image(picture.decode(data, field))
    frames, fps = film.decode(data, field)
    return video(frames, fps)


class Filming(Answer):
    """One video while it is made; the work of a job."""

    def __init__(self, server: Server, request: Request, body: VideoBody) -> None:
        super().__init__(server, request)
        self.body = body
        self.name = body.output_format or "mp4"
        self.encoder = film.Encoder(self.name)
        self.progress = 0
        self.told: dict[str, Any] = {}

    def about(self) -> dict[str, Any]:
        """What is known of the video: what was asked for, and, when there are frames, what they are."""
        settings = {**_settings(self.server, dict(self.request.params)), **self.told}
        frames, fps = settings.get("num_frames"), settings.get("fps")
        seconds = self.body.seconds or (frames / fps if frames and fps else None)
        own = {"model": self.server.deployment.served_name, "prompt": self.body.prompt, "format": self.name}
        length = {"seconds": None if seconds is None else f"{round(seconds, 3):g}"}
        return {**own, **length, **{name: settings.get(name) for name in ("size", "seed", "fps", "num_frames")}}

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    if chunk.kind == PROGRESS:
                        self.progress = min(99, 100 * chunk.meta["done"] // max(1, chunk.meta["total"]))
                        yield b""
                    elif chunk.kind == VIDEO:
                        fps = self.told["fps"] = chunk.meta["fps"]
                        self.told |= {"seed": chunk.meta["seed"]} if "seed" in chunk.meta else {}
                        yield await asyncio.to_thread(self.encoder.push, chunk.data, fps)
        except RequestError as error:
            if error.param != "messages":
                raise
            raise RequestError(error.message, param="prompt") from None
        yield await asyncio.to_thread(self.encoder.finish)

    def file(self, grown: bytes) -> tuple[bytes, str, dict[str, Any]]:
        self.told |= {"size": self.encoder.size, "num_frames": self.encoder.frames}
        return film.whole(grown, self.name), self.name, self.about()

    async def whole(self) -> AsyncGenerator[bytes, None]:
        """The file in one piece."""
        async with aclosing(self.pieces()) as pieces:
            grown = b"".join([piece async for piece in pieces])
        yield await asyncio.to_thread(film.whole, grown, self.name)
