"""How payloads move between two engines: what every connector shares.

A process has one connector. A *flow* is one request on one edge; its chunks are deltas, in order, and end once. The bytes in flight
on a flow are bounded by its window. A subclass says how the data of a chunk is packed and unpacked.

Bounded without deadlock: bytes count as in flight until the consumer takes them off its queue; and a reader that waits on one flow
of a join relieves the windows of the others, since their chunks can only be taken after that wait (Parks' rule for bounded buffers).
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


class Outlet:
    """The sending end of a flow."""

    def __init__(self, connector: Connector, key: Key, to: str, window: int) -> None:
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
        """Send a chunk; waits while the window is full. A consumer that has closed takes nothing, silently."""
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
        """Say that no chunk follows."""
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


class Inbox:
    """The receiving ends of one request's flows."""

    def __init__(self, connector: Connector, request: str, edges: Iterable[str]) -> None:
        self._connector = connector
        self._request = request
        self.flows = {edge: _Incoming() for edge in edges}
        self._arrivals = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._error: OmniError | None = None

    async def get(self, edges: Iterable[str] | None = None, among: Iterable[str] | None = None) -> tuple[str, Payload] | None:
        """The oldest chunk of these edges (default: all) with its edge, or None when all of them have ended.

        `among` are the edges of a join: a reader that waits on some of them never blocks the producers of the others.
        Raises the error given to `fail`.
        """
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
        """Make every `get`, now and later, raise `error`; of two errors the first counts."""
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


class Connector(ABC):
    """Both ends of all flows in one process. Give it every message that arrives: `handle` says whether it was one of its own."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self._outlets: dict[str, dict[str, Outlet]] = {}
        self._inboxes: dict[str, Inbox] = {}

    @abstractmethod
    async def pack(self, payload: Payload, key: Key, to: str) -> tuple[Chunk, Any]:
        """The header and the body to send."""

    @abstractmethod
    def unpack(self, chunk: Chunk, body: Any) -> Payload:
        """The payload of a chunk that arrived."""

    @abstractmethod
    def unpack_nothing(self, chunk: Chunk, body: Any) -> None:
        """Free a chunk that nobody will read (one that arrived, or one packed and not sent)."""

    def expect(self, request: str, edges: Iterable[str]) -> Inbox:
        """Register the flows a request will receive here. Chunks nobody expects are dropped and freed."""
        inbox = self._inboxes[request] = Inbox(self, request, edges)
        return inbox

    def connect(self, request: str, edge: str, to: str, window: int) -> Outlet:
        """The sending end of a flow to the process at address `to`; `window` is in bytes."""
        outlet = Outlet(self, (request, edge), to, window)
        self._outlets.setdefault(request, {})[edge] = outlet
        return outlet

    def close(self, request: str) -> None:
        """Free everything held for a request, sent or received. Producers that still send are told to stop."""
        inbox = self._inboxes.pop(request, None)
        if inbox is not None:
            inbox.discard()
        for outlet in self._outlets.pop(request, {}).values():
            outlet.end()

    def forget(self, address: str) -> None:
        """The process at this address is dead: free what it held of ours, and fail requests that wait for its chunks."""
        for outlets in self._outlets.values():
            for outlet in outlets.values():
                if outlet.to == address:
                    outlet.close()
        for inbox in self._inboxes.values():
            inbox.forget(address)
        self.post.drop(address)

    def held(self) -> Mapping[str, int]:
        """How much is held for open requests; all zero when there are none."""
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
