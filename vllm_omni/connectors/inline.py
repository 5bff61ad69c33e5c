"""Payloads between stages of one process: handed over by reference, nothing is copied."""

from __future__ import annotations

from typing import Any

from vllm_omni.connectors.flows import FlowConnector, Key
from vllm_omni.connectors.messages import Chunk
from vllm_omni.payload import Payload


def _size(data: Any) -> int:
    nbytes = getattr(data, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else len(data) if isinstance(data, (str, bytes, bytearray)) else 0


class InlineConnector(FlowConnector):
    """The connector of a process that holds every stage. A consumer must not change data that others may read too."""

    async def pack(self, payload: Payload, key: Key, to: str) -> tuple[Chunk, Any]:
        return Chunk(*key, number=0, sender=self.post.address, nbytes=_size(payload.data)), payload

    def unpack(self, chunk: Chunk, body: Any) -> Payload:
        payload: Payload = body
        return payload

    def unpack_nothing(self, chunk: Chunk, body: Any) -> None:
        pass
