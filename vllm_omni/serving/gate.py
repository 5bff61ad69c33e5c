"""What every request passes before it reaches an endpoint: the API key, the size limit, the request id, the count.

All paths need the key except those in `OPEN` and below `OPEN_BELOW`. It is plain ASGI, so that it costs little for each chunk of a stream.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Iterable
from typing import ClassVar

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.errors import AuthenticationError, RequestError
from vllm_omni.serving.metrics import Metrics
from vllm_omni.serving.reply import error_response, fault

OPEN = frozenset({"/health", "/playground"})
"""The paths that answer without the key. They compute nothing and list nothing."""
OPEN_BELOW = "/v1/images/files/"
"""What a browser opens from a link, which nobody can guess."""
MAX_BODY = 64 << 20
"""Bytes of the largest body."""
ID = re.compile(rb"[!-~]{1,128}")


class TooLargeError(RequestError):
    """The body is over the limit."""

    status: ClassVar[int] = 413


class Gate:
    """ASGI middleware. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        came = time.perf_counter()
        headers = dict(scope["headers"])
        started = False
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            _check_size(read)
            return message

        async def answer(message: Message) -> None:
            nonlocal started
            if not started and message["type"] == "http.response.start":
                started = True
                if given := headers.get(b"x-request-id"):
                    message["headers"] = [*message["headers"], (b"x-request-id", given)]
                route = scope.get("route")
                took = time.perf_counter() - came if scope["method"] == "POST" else None
                self._metrics.answered(getattr(route, "path", "unmatched"), message["status"], took)
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, counted, answer)
        except ClientDisconnect:
            return None
        except Exception as error:  # noqa: BLE001 - a request fails alone
            response = error_response(fault(error))
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            elif not started:
                await response(scope, receive, answer)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if b"x-request-id" in headers and not ID.fullmatch(headers[b"x-request-id"]):
            del headers[b"x-request-id"]
            raise RequestError("'X-Request-Id' must be 1 to 128 printable ASCII characters without spaces.", param="X-Request-Id")
        if self._keys and scope["path"] not in OPEN and not scope["path"].startswith(OPEN_BELOW):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if scheme.lower() != b"bearer" or not any(matches):
                raise AuthenticationError("No API key, or a wrong one: send 'Authorization: Bearer KEY'.")
        _check_size(int(headers.get(b"content-length", b"0")))


def _check_size(size: int) -> None:
    if size > MAX_BODY:
        raise TooLargeError(f"The body is larger than {MAX_BODY >> 20} MiB: send less, or smaller files.")
