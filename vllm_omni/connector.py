"""How payloads move between two engines: on one device, one host or several. Interfaces only.

A process has one connector. A *flow* is one request on one edge; its chunks are deltas, in order, and end once. The bytes in
flight on a flow are bounded by its window: `put` waits while the consumer is behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from vllm_omni.errors import OmniError
from vllm_omni.payload import Payload


class Outlet(Protocol):
    """The sending end of a flow."""

    async def put(self, payload: Payload) -> None:
        """Send a chunk; waits while the window is full. A consumer that has closed takes nothing, silently."""

    def finish(self) -> None:
        """Say that no chunk follows."""


class Inbox(Protocol):
    """The receiving ends of one request's flows in this process."""

    async def get(self, edges: Iterable[str] | None = None, among: Iterable[str] | None = None) -> tuple[str, Payload] | None:
        """The oldest chunk of these edges (default: all) with its edge, or None when all of them have ended.

        `among` are the edges of a join: a reader that waits on some of them never blocks the producers of the others.
        Raises the error given to `fail`.
        """

    def fail(self, error: OmniError) -> None:
        """Make every `get`, now and later, raise `error`."""


class Connector(Protocol):
    """Both ends of all flows in one process."""

    def expect(self, request: str, edges: Iterable[str]) -> Inbox:
        """Register the flows a request will receive here. Chunks nobody expects are dropped and freed."""

    def connect(self, request: str, edge: str, to: str, window: int) -> Outlet:
        """The sending end of a flow to the process at address `to`."""

    def close(self, request: str) -> None:
        """Free everything held for a request, sent or received. Producers that still send are told to stop."""

    def forget(self, address: str) -> None:
        """The process at this address is dead: free what it held of ours, and fail requests that wait for its chunks."""

    def held(self) -> Mapping[str, int]:
        """How much is held for open requests; all zero when there are none."""
