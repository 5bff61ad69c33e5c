"""What the processes of an `AsyncOmni` still hold for requests."""

from __future__ import annotations

import asyncio
import gc

from vllm_omni.omni import AsyncOmni


async def nothing_held(omni: AsyncOmni, collect: bool = True) -> None:
    """Wait until all is zero but the memory of the processes, for ever: the caller's timeout bounds it.

    `collect`: garbage of the test's own may be in the way.
    """
    while True:
        if collect:
            gc.collect()
        stats = await omni.stats()
        if not any(value for one in stats.values() for name, value in one.items() if not name.endswith("_bytes")):
            return
        await asyncio.sleep(0.01)
