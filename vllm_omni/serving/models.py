"""The endpoints about the server itself: `/health`, `/version`, `/metrics`, `/v1/models`. They compute nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from vllm_omni import __version__
from vllm_omni.errors import UnavailableError
from vllm_omni.hookspecs import hookimpl
from vllm_omni.serving.reply import error_response, json_response
from vllm_omni.serving.server import Server


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 when a request would be served, 503 with the reason when not. Needs no key."""
        if reason := server.unready:
            return error_response(UnavailableError(f"Not ready: {reason}."))
        return json_response({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(server.metrics.render(await server.omni.stats()), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> Response:
        """The served model, as a list of one."""
        return json_response({"object": "list", "data": [_model(server)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        server.check_model(name)
        return json_response(_model(server))

    return [router]


def _model(server: Server) -> dict[str, Any]:
    graph = server.deployment.graph
    kinds = {"input_modalities": [str(kind) for kind in graph.takes], "output_modalities": [str(kind) for kind in graph.outputs]}
    served = server.deployment.served_name
    return {"id": served, "object": "model", "created": server.created, "owned_by": "vllm-omni", "architecture": kinds}
