"""`/playground`: a page to try the served model with, in a browser. All that it knows it asks the other endpoints."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from vllm_omni.hookspecs import hookimpl
from vllm_omni.serving.server import Server

POLICY = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; media-src blob:"


@hookimpl
def vllm_omni_endpoints(server: Server) -> list[APIRouter]:
    router = APIRouter()
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")

    @router.get("/playground", include_in_schema=False)
    async def playground() -> HTMLResponse:
        """Needs no key: it lists nothing, and asks for one."""
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    return [router]
