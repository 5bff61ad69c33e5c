"""Answers in OpenAI's shapes that are made while the client listens, and stop being made when the client is gone.

An ASGI server tells an application of a lost client only when asked, and web frameworks stopped asking; a `Reply` asks all the
time, also while nothing is produced. It knows no protocol and no model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_omni.errors import OmniError, UnavailableError

log = logging.getLogger(__name__)

CLOSING = "the server is shutting down"
"""The message of the cancellation that ends an answer at shutdown, in contrast to one whose client is gone."""
EVENTS = "text/event-stream; charset=utf-8"
"""The media type of server-sent events."""
AHEAD = 32
"""Pieces that may wait for a slow client before no more are made."""


def fault(error: BaseException) -> OmniError:
    """What a client is told of an error. One that was not raised on purpose is logged, here and only here."""
    if isinstance(error, OmniError):
        return error
    log.error("A request failed on an error of the server.", exc_info=error)
    return OmniError(f"The server failed on this request ({type(error).__name__}); its log has the cause.")


def error_body(error: OmniError, status: int) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    message = error.message
    if error.stage and error.stage not in message:
        message = f"Stage '{error.stage}': {message}"
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: OmniError, status: int | None = None) -> Response:
    """The error as a whole response."""
    status = status or error.status
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status)
    return Response(msgspec.json.encode(error_body(error, status)), status, headers, "application/json")


def event(body: Any) -> bytes:
    """A server-sent event of JSON. Bytes in it become base64."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Reply(Response):
    """An answer that is made while the client listens, of pieces that are sent as they come.

    Those that came at once, or while a slow client held the line, go together; with `whole` all of them, with their length.
    An error before anything was sent becomes an error response. After that it is told in a last event, or, if these are no
    `EVENTS`, by cutting the connection, so that the client cannot take the part for the whole.

    The task that makes the pieces is cancelled when the client is gone. The application's `state.running` has it, so that a server
    that shuts down can cancel it too, with the message `CLOSING`.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], media_type: str, *, whole: bool = False) -> None:
        super().__init__(media_type=media_type)
        self._pieces = pieces
        self._whole = whole
        self._ready: list[bytes] = []
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self.raw_headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._make())
        running: set[asyncio.Task[None]] = scope["app"].state.running
        running.add(work)
        work.add_done_callback(running.discard)
        work.add_done_callback(lambda _: self._news.set())
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: work.cancel())  # nothing happens to work that is done
        try:
            await self._answer(work, scope, receive, send)
        finally:
            gone.cancel()
            work.cancel()

    async def _make(self) -> None:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                self._ready.append(piece)
                if self._whole:
                    continue  # nothing is sent before all is there
                self._news.set()
                if len(self._ready) >= AHEAD:
                    self._room.clear()
                    await self._room.wait()

    async def _answer(self, work: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> None:
        started = over = False
        while not over:
            await self._news.wait()
            self._news.clear()
            over = work.done()
            error = _failure(work) if over else None
            if error and not started:
                await error_response(error)(scope, receive, send)
                return
            piece, self._ready = b"".join(self._ready), []
            self._room.set()
            if not started:
                started = True
                if self._whole:
                    self.raw_headers.append((b"content-length", str(len(piece)).encode()))
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if error and self.media_type != EVENTS:
                return  # without an end to the body: the server cuts the connection
            if error:
                piece += event(error_body(error, error.status))
            await send({"type": "http.response.body", "body": piece, "more_body": not over})


def _failure(work: asyncio.Task[None]) -> OmniError | None:
    """What went wrong with work that is done. Raises ClientDisconnect if nobody is there to be told."""
    try:
        error = work.exception()  # not result(): a raised error would hold on to this frame, the frame to the work, the work to it
    except asyncio.CancelledError as cancelled:
        if cancelled.args == (CLOSING,):
            return UnavailableError(f"The request was cut short: {CLOSING}.")
        raise ClientDisconnect from None
    return fault(error) if error else None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
