"""Requests run on a model in this process, one by one or at once, with all their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import Payload
from vllm_omni.request import Request, new_id

Result = TypeVar("Result")


def using(model: str, work: Callable[[AsyncOmni], Awaitable[Result]]) -> Result:
    """The result of `work` on a started model, which is stopped afterwards."""

    async def run() -> Result:
        async with AsyncOmni(model, inline=True) as omni:
            return await work(omni)

    return asyncio.run(run())


async def collect(omni: AsyncOmni, request: Request) -> list[Payload]:
    """All chunks of a request, which is sent under a new id."""
    async with aclosing(omni.stream(replace(request, id=new_id()))) as stream:
        return [chunk async for chunk in stream]


async def one_by_one(omni: AsyncOmni, requests: Iterable[Request]) -> list[list[Payload]]:
    return [await collect(omni, request) for request in requests]


async def assert_freed(omni: AsyncOmni) -> None:
    """Fails if five seconds pass and a process still holds something for a request. An array that the caller keeps counts too."""
    left: dict[str, float] = {}
    for _ in range(500):
        stats = await omni.stats()
        held = ((f"{process}.{gauge}", value) for process, gauges in stats.items() for gauge, value in gauges.items())
        left = {name: value for name, value in held if value and not name.endswith("_bytes")}
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still held: {left}")
