"""Payloads between stages of one process: handed over by reference, nothing is copied.

What could not travel between processes is refused here too, so that a model tried in one process runs in several.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.connectors.flows import Connector, Key
from vllm_omni.connectors.messages import Chunk
from vllm_omni.connectors.tensors import container_of
from vllm_omni.payload import Payload


class InlineConnector(Connector):
    """The connector of a process that holds every stage. A consumer must not change data that others may read too."""

    async def pack(self, payload: Payload, key: Key, to: str) -> tuple[Chunk, Any]:
        data, container = payload.data, container_of(payload.data)
        nbytes = data.nbytes if hasattr(data, "nbytes") else len(data or "")
        return Chunk(*key, number=0, sender=self.post.address, container=container, nbytes=nbytes), payload

    def unpack(self, chunk: Chunk, body: Any) -> Payload:
        payload: Payload = body
        return payload

    def unpack_nothing(self, chunk: Chunk, body: Any) -> None:
        pass
