"""What every connector shares: windows, order, ends and the queues at the receiving side.

A subclass says how the data of a chunk is packed and unpacked. Bounded without deadlock: bytes count as in flight until the
consumer takes them off its queue; and a reader that waits on one flow of a join relieves the windows of the others, since their
chunks can only be taken after that wait (Parks' rule for bounded buffers).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from vllm_omni.connectors.messages import Chunk, Closed, Credit, Message, Want, check_plain
from vllm_omni.connectors.post import Post
from vllm_omni.errors import AbortedError, OmniError, StageError, UnavailableError
from vllm_omni.payload import Payload

Key = tuple[str, str]

_CREDIT_STEP = 1 << 20
"""Bytes taken before credit is sent unasked. A producer that waits asks, so a smaller window works too."""
_LIGHTEST = 1 << 10
"""A chunk counts as this many bytes at least: many small ones need memory too."""


def _weight(chunk: Chunk) -> int:
    return max(chunk.nbytes, _LIGHTEST)


class FlowOutlet:
    """The sending end of a flow."""

    def __init__(self, connector: FlowConnector, key: Key, to: str, window: int) -> None:
        self._connector = connector
        self._key = key
        self.to = to
        self._window = window
        self._number = 0
        self._in_flight = 0
        self._room: asyncio.Future[None] | None = None
        self._asked = False
        self._closed = False
        self._ended = False

    async def put(self, payload: Payload) -> None:
        if self._closed:
            return
        if self._ended:
            raise AbortedError("The request has ended.")
        check_plain(f"Meta of '{payload.kind}'", dict(payload.meta))
        chunk, body = await self._connector.pack(payload, self._key, self.to)
        sent = False
        try:
            # An abort or a close may have come while the data was copied, and while this waits.
            while not (self._closed or self._ended) and self._in_flight and self._in_flight + _weight(chunk) > self._window:
                if not self._asked:
                    self._asked = True
                    self._connector.post.send(self.to, Want(*self._key))
                self._room = asyncio.get_running_loop().create_future()
                await self._room
            if self._ended:
                raise AbortedError("The request has ended.")
            if not self._closed:
                self._send(chunk, body)
                self._in_flight += _weight(chunk)
                sent = True
        finally:
            if not sent:
                self._connector.unpack_nothing(chunk, body)

    def finish(self) -> None:
        if not self._closed and not self._ended:
            self._send(Chunk(*self._key, number=0, sender=self._connector.post.address, last=True), None)
            self._ended = True

    def _send(self, chunk: Chunk, body: Any) -> None:
        chunk.number = self._number
        self._number += 1
        self._connector.post.send(self.to, chunk, body)

    def credit(self, nbytes: int) -> None:
        self._in_flight -= nbytes
        self._wake()

    def close(self) -> None:
        """The consumer takes nothing more."""
        self._closed = True
        self._wake()

    def end(self) -> None:
        """The request is over here."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class _Incoming:
    """The receiving end of one flow."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, Chunk, Any]] = deque()
        self.expected = 0
        self.ended = False
        self.sender = ""
        self.uncredited = 0
        self.relieved = 0  # chunks at the head of the queue whose bytes are credited already
        self.eager = False


class FlowInbox:
    """The receiving ends of one request's flows."""

    def __init__(self, connector: FlowConnector, request: str, edges: Iterable[str]) -> None:
        self._connector = connector
        self._request = request
        self.flows = {edge: _Incoming() for edge in edges}
        self._arrivals = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._error: OmniError | None = None

    async def get(self, edges: Iterable[str] | None = None, among: Iterable[str] | None = None) -> tuple[str, Payload] | None:
        names = list(self.flows) if edges is None else list(edges)
        while True:
            if self._error is not None:
                raise copy(self._error)  # one that is raised knows this frame, and this knows the error: neither would ever go
            ready = [name for name in names if self.flows[name].queue]
            if ready:
                name = min(ready, key=lambda edge: self.flows[edge].queue[0][0]) if len(ready) > 1 else ready[0]
                return name, self._take(name)
            if all(self.flows[name].ended for name in names):
                return None
            for name in among or ():
                if name not in names:
                    self._relieve(name)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def _take(self, edge: str) -> Payload:
        flow = self.flows[edge]
        _, chunk, body = flow.queue.popleft()
        if flow.relieved:
            flow.relieved -= 1
        else:
            flow.uncredited += _weight(chunk)
            self._credit(edge)
        return self._connector.unpack(chunk, body)

    def _relieve(self, edge: str) -> None:
        flow = self.flows[edge]
        for _, chunk, _ in list(flow.queue)[flow.relieved :]:
            flow.uncredited += _weight(chunk)
        flow.relieved = len(flow.queue)
        self._credit(edge)

    def _credit(self, edge: str) -> None:
        flow = self.flows[edge]
        if flow.uncredited and (flow.eager or flow.uncredited >= _CREDIT_STEP):
            self._connector.post.send(flow.sender, Credit(self._request, edge, flow.uncredited))
            flow.uncredited = 0

    def want(self, edge: str) -> None:
        """The producer of this edge waits."""
        self.flows[edge].eager = True
        self._credit(edge)
        self._wake()  # a reader of another flow of the join may now relieve this one

    def arrive(self, chunk: Chunk, body: Any) -> None:
        flow = self.flows[chunk.edge]
        flow.sender = chunk.sender
        if chunk.number != flow.expected:
            self.fail(StageError(f"Chunk {flow.expected} of {chunk.edge} is missing; chunk {chunk.number} came instead."))
        flow.expected += 1
        if chunk.last:
            flow.ended = True
        else:
            self._arrivals += 1
            flow.queue.append((self._arrivals, chunk, body))
        self._wake()

    def fail(self, error: OmniError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def forget(self, address: str) -> None:
        """The process at this address is dead: a flow from it that has not ended never will."""
        if any(flow.sender == address and not flow.ended for flow in self.flows.values()):
            self.fail(UnavailableError("A stage went down before all its chunks had come. Try again shortly."))

    def discard(self) -> None:
        """Drop what is queued and tell producers that still send to stop."""
        for edge, flow in self.flows.items():
            for _, chunk, body in flow.queue:
                self._connector.unpack_nothing(chunk, body)
            flow.queue.clear()
            if flow.sender and not flow.ended:
                self._connector.post.send(flow.sender, Closed(self._request, edge))
        self.fail(AbortedError("The request has ended."))


class FlowConnector(ABC):
    """Both ends of all flows in one process. Give it every message that arrives: `handle` says whether it was one of its own."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self._outlets: dict[str, dict[str, FlowOutlet]] = {}
        self._inboxes: dict[str, FlowInbox] = {}

    @abstractmethod
    async def pack(self, payload: Payload, key: Key, to: str) -> tuple[Chunk, Any]:
        """The header and the body to send."""

    @abstractmethod
    def unpack(self, chunk: Chunk, body: Any) -> Payload:
        """The payload of a chunk that arrived."""

    @abstractmethod
    def unpack_nothing(self, chunk: Chunk, body: Any) -> None:
        """Free a chunk that nobody will read (one that arrived, or one packed and not sent)."""

    def expect(self, request: str, edges: Iterable[str]) -> FlowInbox:
        inbox = self._inboxes[request] = FlowInbox(self, request, edges)
        return inbox

    def connect(self, request: str, edge: str, to: str, window: int) -> FlowOutlet:
        outlet = FlowOutlet(self, (request, edge), to, window)
        self._outlets.setdefault(request, {})[edge] = outlet
        return outlet

    def close(self, request: str) -> None:
        inbox = self._inboxes.pop(request, None)
        if inbox is not None:
            inbox.discard()
        for outlet in self._outlets.pop(request, {}).values():
            outlet.end()

    def forget(self, address: str) -> None:
        for outlets in self._outlets.values():
            for outlet in outlets.values():
                if outlet.to == address:
                    outlet.close()
        for inbox in self._inboxes.values():
            inbox.forget(address)
        self.post.drop(address)

    def held(self) -> Mapping[str, int]:
        return {"inboxes": len(self._inboxes), "outlets": sum(map(len, self._outlets.values()))}

    def handle(self, message: Message, body: Any) -> bool:
        if isinstance(message, Chunk):
            inbox = self._inboxes.get(message.request)
            if inbox is not None and message.edge in inbox.flows:
                inbox.arrive(message, body)
            else:
                self.unpack_nothing(message, body)
                if not message.last:
                    self.post.send(message.sender, Closed(message.request, message.edge))
        elif isinstance(message, (Credit, Closed)):
            outlet = self._outlets.get(message.request, {}).get(message.edge)
            if outlet is not None:
                if isinstance(message, Credit):
                    outlet.credit(message.nbytes)
                else:
                    outlet.close()
        elif isinstance(message, Want):
            inbox = self._inboxes.get(message.request)
            if inbox is not None and message.edge in inbox.flows:
                inbox.want(message.edge)
        else:
            return False
        return True
