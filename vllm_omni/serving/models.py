"""The endpoints about the server itself: `/health`, `/version`, `/metrics`, `/v1/models`. They compute nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from vllm_omni import __version__
from vllm_omni.hookspecs import hookimpl
from vllm_omni.payload import PROGRESS
from vllm_omni.serving.server import Server


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 when a request would be served, 503 with the reason when not. Needs no key."""
        server.check_ready()
        return {"status": "ready"}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(server.metrics.render(await server.omni.stats()), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, as a list of one."""
        return {"object": "list", "data": [_model(server)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return _model(server)

    return [router]


def _model(server: Server) -> dict[str, Any]:
    graph = server.deployment.graph
    kinds = {
        "input_modalities": [str(kind) for kind in graph.takes],
        "output_modalities": [str(kind) for kind in graph.outputs if kind != PROGRESS],
    }
    served = server.deployment.served_name
    return {"id": served, "object": "model", "created": server.created, "owned_by": "vllm-omni", "architecture": kinds}
