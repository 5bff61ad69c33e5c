"""What the processes of an `AsyncOmni` still hold for requests."""

from __future__ import annotations

import asyncio
import gc

from vllm_omni.omni import AsyncOmni


async def held(omni: AsyncOmni) -> dict[str, int]:
    """What is not zero, by process and name; the memory of a process is none of it."""
    stats = await omni.stats()
    return {f"{process}.{name}": value for process, one in stats.items() for name, value in one.items() if value and name != "rss_bytes"}


async def nothing_held(omni: AsyncOmni, collect: bool = True) -> None:
    """Wait for that, for ever: the caller's timeout bounds it. `collect`: garbage of the test's own may be in the way."""
    while True:
        if collect:
            gc.collect()
        if not await held(omni):
            return
        await asyncio.sleep(0.01)
