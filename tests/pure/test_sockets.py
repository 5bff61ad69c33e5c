"""The control channel between processes: what arrives there, and what does not, changes nothing for the other messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_omni.connectors.messages import MESSAGES, Closed, Message
from vllm_omni.connectors.sockets import SocketPost


def frames(message: Message, body: bytes = b"") -> list[bytes]:
    return [bytes([MESSAGES.index(type(message))]) + msgspec.msgpack.encode(message), body]


def test_a_letter_box_survives_what_it_gets(tmp_path: Path) -> None:
    """Malformed frames, a handler that fails, addresses that cannot be: the other messages come through."""

    async def main() -> None:
        here, there = SocketPost(f"{tmp_path}/here"), SocketPost(f"{tmp_path}/there")
        came: list[str] = []

        def handle(message: Message, body: Any) -> None:
            came.append(message.request)  # type: ignore[union-attr]
            if message == Closed("fail", "e"):
                raise RuntimeError("the handler failed")

        failed: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))
        there.listen(handle)
        with zmq.Context() as context, context.socket(zmq.PUSH) as hostile:
            hostile.connect(f"ipc://{tmp_path}/there")
            bad = [
                b"",
                b"\xff\xff",
                b"\x04",
                b"\x04\xc1",
                b"\x04\x81\xa4meta\x81\xa1x" + b"\x91" * 9_000,
                b"\x04\xdf\xff\xff\xff\xff",
                b"\x04\x81\xa1x\xa2\xff\xff",
            ]
            for head in bad:
                hostile.send_multipart([head, b""])
            hostile.send_multipart([head for head in bad for _ in range(2)] + [b"odd"])
            hostile.send_multipart([*frames(Closed("fail", "e")), *frames(Closed("next", "e"))])
            async with asyncio.timeout(10):
                while came != ["fail", "next"]:
                    await asyncio.sleep(0.01)
        for to in ("", "x" * 200, f"{tmp_path}/there"):
            here.send(to, Closed("late", "e"))
        async with asyncio.timeout(10):
            while came[-1] != "late":
                await asyncio.sleep(0.01)
        here.drop(f"{tmp_path}/there")
        here.send(f"{tmp_path}/there", Closed("dead", "e"))  # no socket that would try for ever to reach a dead process
        await asyncio.sleep(0.02)
        assert f"{tmp_path}/there" not in here._peers
        for post in (here, there):
            post.close()
            post.send("anyone", Closed("closed", "e"))
        await asyncio.sleep(0.02)
        assert not failed

    asyncio.run(main())
