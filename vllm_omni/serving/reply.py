"""Answers in OpenAI's shapes that are made while the client listens, and stop being made when the client is gone.

An ASGI server tells an application of a lost client only when asked, and web frameworks stopped asking; a `Reply` asks all the
time, also while nothing is produced. It knows no protocol and no model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_omni.errors import OmniError, UnavailableError

log = logging.getLogger(__name__)

CLOSING = "the server is shutting down"
"""The message of the cancellation that ends an answer at shutdown, in contrast to one whose client is gone."""
CUT_SHORT = UnavailableError(f"The request was cut short: {CLOSING}.")


def fault(error: Exception) -> OmniError:
    """What a client is told of an error. One that was not raised on purpose is logged, here and only here."""
    if isinstance(error, OmniError):
        return error
    log.error("A request failed on an error of the server.", exc_info=error)
    return OmniError(f"The server failed on this request ({type(error).__name__}); its log has the cause.")


def error_body(error: OmniError, status: int | None = None) -> bytes:
    """The error as JSON in OpenAI's shape."""
    status = status or error.status
    kind = "server_error" if status >= 500 else "invalid_request_error"
    message = error.message
    if error.stage and error.stage not in message:
        message = f"Stage '{error.stage}': {message}"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": error.param, "code": error.code}})


def error_response(error: OmniError, status: int | None = None) -> Response:
    """The error as a whole response."""
    status = status or error.status
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status)
    return Response(error_body(error, status), status, headers, "application/json")


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class Reply(Response):
    """An answer still to be made. `write` sends it; the tasks of all open replies are in `running`.

    The work is cancelled when the client is gone, and when the server cancels its task with the message `CLOSING`.
    """

    def __init__(self, media_type: str, running: set[asyncio.Task[None]]) -> None:
        super().__init__(media_type=media_type)
        self._running = running

    async def write(self, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self.write(send))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: work.cancel())  # nothing happens to work that is done
        try:
            await work
        except asyncio.CancelledError:
            if not gone.done():
                raise
        finally:
            gone.cancel()


class Whole(Reply):
    """A reply of one piece, with its length. `make` gives the bytes; what it raises becomes an error response."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], media_type: str, running: set[asyncio.Task[None]]) -> None:
        super().__init__(media_type, running)
        self._make = make

    async def write(self, send: Send) -> None:
        try:
            response = Response(await self._make(), media_type=self.media_type)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (CLOSING,):
                raise
            response = error_response(CUT_SHORT)
        except Exception as error:  # noqa: BLE001 - a request fails alone
            response = error_response(fault(error))
        await response({"type": "http"}, _never, send)


class Stream(Reply):
    """A reply of many pieces, each sent as soon as `pieces` gives it.

    Before the first piece an error becomes an error response. After it, `on_error` gives a last piece that tells the client; without
    one the connection is cut, so that the client cannot take the part for the whole.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        media_type: str,
        running: set[asyncio.Task[None]],
        on_error: Callable[[OmniError], bytes] | None = None,
    ) -> None:
        super().__init__(media_type, running)
        self._pieces = pieces
        self._on_error = on_error
        self.raw_headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    async def write(self, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (CLOSING,):
                raise
            await self._fail(CUT_SHORT, started, send)
        except Exception as error:  # noqa: BLE001 - a request fails alone
            await self._fail(fault(error), started, send)

    async def _fail(self, error: OmniError, started: bool, send: Send) -> None:
        if not started:
            await error_response(error)({"type": "http"}, _never, send)
        elif self._on_error is not None:
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": False})


def error_event(error: OmniError) -> bytes:
    """An error in mid-stream: the event after which a stream of events ends."""
    return event(error_body(error))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    raise RuntimeError("a response does not read")
