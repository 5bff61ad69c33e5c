"""The control channel between processes of one host: pyzmq over Unix sockets, messages as msgpack.

Reads and writes on the event loop without a task per message. Messages of one tick to one process travel together.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import zmq

from vllm_omni.connectors.messages import MESSAGES, Message
from vllm_omni.connectors.post import Handler

log = logging.getLogger(__name__)

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in MESSAGES]
_TAGS = {kind: bytes([tag]) for tag, kind in enumerate(MESSAGES)}
_BURST = 256


class SocketPost:
    """A letter box at `address`, a path in a directory that only this user can enter."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.Context(io_threads=1)
        self._loop = asyncio.get_running_loop()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._descriptor = int(self._inbox.getsockopt(zmq.FD))
        self._inbox.bind(f"ipc://{address}")
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._outgoing: dict[str, list[Any]] = {}
        self._dead: set[str] = set()
        self._handler: Handler = lambda message, body: None

    def listen(self, handler: Handler) -> None:
        self._handler = handler
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.call_soon(self._read)

    def send(self, to: str, message: Message, body: Any = None) -> None:
        if self._inbox.closed or to in self._dead:
            return
        frames = self._outgoing.get(to)
        if frames is None:
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            frames = self._outgoing[to] = []
        frames.append(_TAGS[type(message)] + _ENCODE(message))
        frames.append(b"" if body is None else body)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for to, frames in outgoing.items():
            try:
                peer = self._peers.get(to) or self._connect(to)
                peer.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
            except zmq.ZMQError as error:
                log.error("Messages to %r are lost: %s.", to, error)

    def _connect(self, to: str) -> zmq.Socket[bytes]:
        peer = self._peers[to] = self._context.socket(zmq.PUSH)
        peer.setsockopt(zmq.SNDHWM, 0)
        peer.setsockopt(zmq.LINGER, 1000)
        peer.connect(f"ipc://{to}")
        return peer

    def _read(self) -> None:
        # The descriptor signals changes, not state: it must be read until empty, or asked again.
        for _ in range(_BURST):
            if self._inbox.closed:
                return
            try:
                frames = self._inbox.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            for index in range(0, len(frames) - 1, 2):
                self._deliver(frames[index], frames[index + 1])
        self._loop.call_soon(self._read)

    def _deliver(self, head: bytes, body: bytes) -> None:
        try:
            message: Message = _DECODERS[head[0]].decode(memoryview(head)[1:])
            self._handler(message, body)
        except Exception:  # malformed, or of a request that fails alone: the messages behind it must arrive
            log.exception("A message of %d bytes was dropped.", len(head))

    def drop(self, to: str) -> None:
        self._dead.add(to)
        self._outgoing.pop(to, None)
        peer = self._peers.pop(to, None)
        if peer is not None:
            peer.close(linger=0)

    def close(self) -> None:
        if self._inbox.closed:
            return
        self._flush()
        self._loop.remove_reader(self._descriptor)
        self._inbox.close(linger=0)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._context.term()
