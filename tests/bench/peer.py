"""The other process of `test_transport.py`: receives arrays, answers each with the seconds it was under way."""

from __future__ import annotations

import sys
import time

import uvloop

from vllm_omni.connectors.shm import ShmConnector
from vllm_omni.connectors.sockets import SocketPost
from vllm_omni.payload import text


async def main(here: str, there: str) -> None:
    post = SocketPost(here)
    connector = ShmConnector(post, torch_here=False)
    post.listen(lambda message, body: connector.handle(message, body))
    inbox = connector.expect("bench", ["there"])
    back = connector.connect("bench", "back", there, 1 << 20)
    print("ready", flush=True)
    while (item := await inbox.get()) is not None:
        under_way = time.monotonic() - item[1].meta["sent"]
        assert item[1].data[-1] == 1
        del item
        await back.put(text("", seconds=under_way))
    post.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
