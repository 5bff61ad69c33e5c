"""The web application: the endpoints of this package and of installed distributions, and one shape for every error."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from vllm_omni import __version__, hookspecs
from vllm_omni.errors import NotFoundError, PluginError, RequestError
from vllm_omni.serving import chat, images, models, playground, speech, videos
from vllm_omni.serving.gate import Gate
from vllm_omni.serving.reply import error_response
from vllm_omni.serving.server import Server

KEEP_ALIVE = 65
"""Seconds an idle connection stays open: longer than clients and proxies keep theirs, so that none sends into a closing one."""


def build(server: Server, keys: Iterable[str] = ()) -> FastAPI:
    """The application. Raises PluginError for an endpoint that does not fit."""
    handlers: Any = {HTTPException: _refused, RequestValidationError: _invalid}
    app = FastAPI(title="vllm-omni", version=__version__, exception_handlers=handlers)
    app.state.running = server.running
    app.add_middleware(Gate, keys=list(keys), metrics=server.metrics)
    manager = hookspecs.plugins()
    for module in (chat, speech, images, videos, models, playground):
        manager.register(module, name=module.__name__)
    taken: dict[tuple[str, str], str] = {}
    for implementation in manager.hook.vllm_omni_endpoints.get_hookimpls():
        owner = implementation.plugin_name
        try:
            routers: Any = implementation.function(server=server)
        except Exception as error:
            raise hookspecs.broken(owner, error) from error
        for router in routers:
            if not isinstance(router, APIRouter):
                raise PluginError(f"Hook 'vllm_omni_endpoints' of {owner} gave {router!r}, which is no APIRouter.")
            _claim(taken, router.routes, owner)
            app.include_router(router)
    return app


class _WebServer(uvicorn.Server):
    """uvicorn without its signal handlers: who runs it stops it."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def web_server(app: FastAPI) -> uvicorn.Server:
    """The server of the application, loaded and ready to be given a listening socket."""
    config = uvicorn.Config(
        app, http="httptools", lifespan="off", log_config=None, access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    config.load()
    return _WebServer(config)


def _claim(taken: dict[tuple[str, str], str], routes: Iterable[BaseRoute], owner: str) -> None:
    for route in routes:
        path = getattr(route, "path", "")
        for method in sorted(getattr(route, "methods", None) or ("WEBSOCKET",)):
            if (other := taken.setdefault((method, path), owner)) != owner:
                raise PluginError(f"{method} {path} is served by both {other} and {owner}: uninstall one of them.")


async def _invalid(_: Request, error: RequestValidationError) -> Response:
    """What an installed endpoint that lets FastAPI check its fields says of a wrong one."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"][1:]))
    return error_response(RequestError(f"'{field or 'The body'}': {first['msg']}.", param=field or None))


async def _refused(request: Request, error: HTTPException) -> Response:
    """What FastAPI or an installed endpoint refuses: a path or a method that does not exist, for one."""
    if error.status_code == 404:
        return error_response(NotFoundError(f"There is no {request.method} {request.url.path}. GET /docs lists the endpoints."))
    headers = dict(error.headers or {})
    allowed = f"; allowed is {headers['Allow']}" if "Allow" in headers else ""
    response = error_response(RequestError(f"{request.method} {request.url.path}: {error.detail}{allowed}."), error.status_code)
    response.headers.update(headers)
    return response
