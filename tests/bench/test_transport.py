"""An array through shared memory to another process, beside a copy of the same array in the same run.

One way: from before `put` to the moment the consumer holds the array. `extra_info` has the medians in milliseconds and their ratio.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import uvloop

from vllm_omni.connectors.shm import ShmConnector
from vllm_omni.connectors.sockets import SocketPost
from vllm_omni.payload import Kind, Payload

PEER = Path(__file__).with_name("peer.py")


@pytest.mark.parametrize(("mib", "rounds"), [(1, 500), (64, 40)])
def test_one_way(benchmark: Any, tmp_path: Path, mib: int, rounds: int) -> None:
    here, there = f"{tmp_path}/here.{os.getpid()}", f"{tmp_path}/there.0"
    array = numpy.ones(mib << 20, numpy.uint8)
    target = numpy.zeros_like(array)
    seconds: list[float] = []

    async def main() -> None:
        post = SocketPost(here)
        connector = ShmConnector(post, torch_here=False)
        post.listen(lambda message, body: connector.handle(message, body))
        inbox = connector.expect("bench", ["back"])
        peer = subprocess.Popen([sys.executable, str(PEER), there, here], stdout=subprocess.PIPE, text=True)
        assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
        outlet = connector.connect("bench", "there", there, 256 << 20)
        for _ in range(rounds):
            await outlet.put(Payload(Kind("array"), array, {"sent": time.monotonic()}))
            item = await inbox.get()
            assert item is not None
            seconds.append(item[1].meta["seconds"])
        outlet.finish()
        await asyncio.sleep(0.05)
        assert await asyncio.to_thread(peer.wait, 10) == 0
        post.close()
        connector.close_all()

    uvloop.run(main())
    benchmark.pedantic(numpy.copyto, (target, array), rounds=rounds, warmup_rounds=3)
    copy = statistics.median(benchmark.stats.stats.data)
    one_way = statistics.median(seconds[3:])
    benchmark.extra_info.update({"one_way_p50_ms": one_way * 1e3, "copy_p50_ms": copy * 1e3, "share_of_a_copy": copy / one_way})
    print(f"\n{mib} MiB: one way p50 {one_way * 1e3:.3f} ms, a copy {copy * 1e3:.3f} ms, {copy / one_way:.2f} of a copy's speed")
