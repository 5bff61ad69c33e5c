"""Payloads between processes of one host, through shared memory.

The producer copies an array once, into a block of a memory file (`memfd_create`) that it pools and has touched before; the consumer
maps that file and reads in place. The block returns to the pool when the last view of it is gone, in whichever thread. The files
have no name, so nothing can be left behind, and the size of /dev/shm does not limit them. Small data travels in the message itself.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from vllm_omni.connectors.flows import Connector, Key
from vllm_omni.connectors.messages import Block, Chunk, Message, Release
from vllm_omni.connectors.post import Post
from vllm_omni.connectors.tensors import flatten, restore
from vllm_omni.errors import UnavailableError
from vllm_omni.payload import PUBLIC_KINDS, Kind, Payload

IN_MESSAGE = 16 << 10
"""Data up to this many bytes travels in the message."""
SLAB = 16 << 20
"""Blocks up to a quarter of this share files of this size."""
KEEP = 512 << 20
"""Bytes of files a process keeps for reuse."""
LARGEST_KEPT = 64 << 20
COPY_IN_THREAD = 4 << 20
"""From this many bytes on, the copy runs in a thread: the event loop must not stand still for it."""

Bytes = numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]


class _File:
    """An anonymous memory file, mapped and touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("vllm-omni", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.bytes = _map(self.fd, size)

    def close(self) -> None:
        os.close(self.fd)


def _map(fd: int, size: int) -> Bytes:
    return numpy.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=numpy.uint8)


class Pool:
    """The blocks this process lends to consumers."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[_File, int]]] = {}
        self._lent: dict[int, tuple[_File, int, int, bool, str]] = {}
        self._kept = 0
        self._next = 0

    @property
    def lent(self) -> int:
        return len(self._lent)

    def lend(self, nbytes: int) -> tuple[Block, Bytes]:
        """A block for `nbytes` bytes, not yet handed to a consumer, and those bytes here."""
        size = nbytes if nbytes > LARGEST_KEPT else 1 << max(nbytes - 1, IN_MESSAGE).bit_length()
        free = self._free.setdefault(size, []) if nbytes <= LARGEST_KEPT else []
        once = False
        if free:
            file, offset = free.pop()
        else:
            file_size = SLAB if size <= SLAB // 4 else size
            once = nbytes > LARGEST_KEPT or self._kept + file_size > KEEP
            file, offset = _File(size if once else file_size), 0
            if not once:
                self._kept += file.size
                free += [(file, start) for start in range(size, file.size, size)]
        self._next += 1
        self._lent[self._next] = (file, offset, size, once, "")
        return Block(self._next, os.getpid(), file.fd, file.size, offset, once), file.bytes[offset : offset + nbytes]

    def hand(self, block: int, to: str) -> None:
        """The block is written, and the consumer at `to` is to get it."""
        if block in self._lent:
            self._lent[block] = (*self._lent[block][:4], to)

    def take_back(self, block: int) -> None:
        entry = self._lent.pop(block, None)
        if entry is None:
            return
        file, offset, size, once, _ = entry
        if once:
            file.close()
        else:
            self._free[size].append((file, offset))

    def take_back_from(self, to: str) -> None:
        """A consumer is dead: all it held is free."""
        for block in [block for block, entry in self._lent.items() if entry[4] == to]:
            self.take_back(block)

    def close(self) -> None:
        """Free all files. Consumers keep what they have mapped."""
        files = {id(file): file for free in self._free.values() for file, _ in free}
        files.update({id(entry[0]): entry[0] for entry in self._lent.values()})
        for file in files.values():
            file.close()
        self._free.clear()
        self._lent.clear()


class _Lease:
    """A borrowed range of bytes. An array made from it (`numpy.asarray`) and all views of that keep it alive; then it goes back."""

    __slots__ = ("__array_interface__", "_back", "_file")

    def __init__(self, file: Bytes, offset: int, nbytes: int, back: Callable[[], None]) -> None:
        self._file = file
        self._back = back
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (file.ctypes.data + offset, False), "version": 3}

    def __del__(self) -> None:
        self._back()


class ShmConnector(Connector):
    """The connector of a process among others. `torch_here`: hand tensors over as tensors."""

    def __init__(self, post: Post, *, torch_here: bool) -> None:
        super().__init__(post)
        self._pool = Pool()
        self._torch_here = torch_here
        self._files: dict[tuple[int, int], Bytes] = {}
        self._returned: deque[tuple[str, int]] = deque()
        self._returning = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def pack(self, payload: Payload, key: Key, to: str) -> tuple[Chunk, Any]:
        flat = flatten(payload.data)
        chunk = Chunk(
            *key, number=0, sender=self.post.address, kind=payload.kind.name, container=flat.container, dtype=flat.dtype,
            shape=flat.shape, nbytes=flat.data.nbytes, meta=dict(payload.meta),
        )  # fmt: skip
        if chunk.nbytes <= IN_MESSAGE:
            return chunk, bytes(flat.data)
        chunk.block, target = self._pool.lend(chunk.nbytes)
        source = numpy.frombuffer(flat.data, dtype=numpy.uint8)
        if chunk.nbytes < COPY_IN_THREAD:
            numpy.copyto(target, source)
        else:
            await self._copy_in_thread(chunk.block.id, target, source)
        self._pool.hand(chunk.block.id, to)  # not before: the consumer may die while a thread still writes
        return chunk, None

    async def _copy_in_thread(self, block: int, target: Bytes, source: Bytes) -> None:
        copying = self._loop.run_in_executor(None, numpy.copyto, target, source)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(lambda _: self._pool.take_back(block))
            raise

    def unpack(self, chunk: Chunk, body: Any) -> Payload:
        data = bytearray(body) if chunk.block is None else self._borrow(chunk.block, chunk.nbytes, chunk.sender)
        kind = PUBLIC_KINDS.get(chunk.kind) or Kind(chunk.kind)
        return Payload(kind, restore(chunk.container, chunk.dtype, chunk.shape, data, torch_here=self._torch_here), chunk.meta)

    def _borrow(self, block: Block, nbytes: int, sender: str) -> Bytes:
        file = self._files.get((block.pid, block.fd))
        if file is None:
            try:
                fd = os.open(f"/proc/{block.pid}/fd/{block.fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise UnavailableError(f"A stage went down before its chunk was read ({error.strerror}). Try again shortly.") from error
            try:
                file = _map(fd, block.size)
            finally:
                os.close(fd)
            if not block.once:
                self._files[block.pid, block.fd] = file
        return numpy.asarray(_Lease(file, block.offset, nbytes, lambda: self._give_back(sender, block.id)))

    def unpack_nothing(self, chunk: Chunk, body: Any) -> None:
        if chunk.block is None:
            return
        if chunk.sender == self.post.address:
            self._pool.take_back(chunk.block.id)
        else:
            self._give_back(chunk.sender, chunk.block.id)

    def _give_back(self, sender: str, block: int) -> None:
        # The last view of a block may die in any thread, an engine's for one.
        self._returned.append((sender, block))
        if self._returning or self._loop.is_closed():
            return
        self._returning = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._send_back)
        else:
            self._loop.call_soon_threadsafe(self._send_back)

    def _send_back(self) -> None:
        self._returning = False
        by_sender: dict[str, list[int]] = {}
        while self._returned:
            sender, block = self._returned.popleft()
            by_sender.setdefault(sender, []).append(block)
        for sender, blocks in by_sender.items():
            self.post.send(sender, Release(blocks))

    def handle(self, message: Message, body: Any) -> bool:
        if isinstance(message, Release):
            for block in message.blocks:
                self._pool.take_back(block)
            return True
        return super().handle(message, body)

    def forget(self, address: str) -> None:
        super().forget(address)
        self._pool.take_back_from(address)
        pid = address.rpartition(".")[2]
        for key in [key for key in self._files if str(key[0]) == pid]:
            del self._files[key]

    def held(self) -> Mapping[str, int]:
        return {**super().held(), "leased_blocks": self._pool.lent}

    def close_all(self) -> None:
        """Free the pool; the process ends."""
        self._pool.close()
