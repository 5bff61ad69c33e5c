"""The control channel: messages from process to process, in order per sender, each with an optional body.

`Post` is the interface and `LocalPost` its form inside one process, without sockets. A post does not look into messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from vllm_omni.connectors.messages import Message

Handler = Callable[[Message, Any], None]


class Post(Protocol):
    """A process's letter box. All methods are called on its event loop."""

    @property
    def address(self) -> str: ...
    def listen(self, handler: Handler) -> None:
        """Give every message that arrives to `handler`."""

    def send(self, to: str, message: Message, body: Any = None) -> None:
        """Never waits and never fails: a message to a dead process is lost."""

    def drop(self, to: str) -> None:
        """A process is dead: nothing is sent there any more."""

    def close(self) -> None: ...


class LocalPost:
    """A letter box among others in the same event loop; `boxes` maps their addresses."""

    def __init__(self, address: str, boxes: dict[str, LocalPost]) -> None:
        self.address = address
        self._boxes = boxes
        self._handler: Handler | None = None
        boxes[address] = self

    def listen(self, handler: Handler) -> None:
        self._handler = handler

    def send(self, to: str, message: Message, body: Any = None) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, to, message, body)

    def _deliver(self, to: str, message: Message, body: Any) -> None:
        box = self._boxes.get(to)
        if box is not None and box._handler is not None:
            box._handler(message, body)

    def drop(self, to: str) -> None:
        self._boxes.pop(to, None)

    def close(self) -> None:
        self._boxes.pop(self.address, None)
