"""Flows: order, windows, ends, joins without deadlock; and the bytes of every kind of data, across shared memory."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy
import pytest

from vllm_omni.connectors.flows import Connector
from vllm_omni.connectors.inline import InlineConnector
from vllm_omni.connectors.messages import Chunk
from vllm_omni.connectors.post import LocalPost
from vllm_omni.connectors.shm import IN_MESSAGE, LARGEST_KEPT, ShmConnector
from vllm_omni.connectors.sockets import SocketPost
from vllm_omni.errors import AbortedError, OmniError, RequestError, StageError, UnavailableError
from vllm_omni.payload import Kind, Payload, text

ARRAY = Kind("array")
Pair = tuple[Connector, Connector]


def inline_pair(_: Path) -> Pair:
    boxes: dict[str, LocalPost] = {}
    return InlineConnector(LocalPost("a", boxes)), InlineConnector(LocalPost("b", boxes))


def shm_pair(path: Path) -> Pair:
    return (
        ShmConnector(SocketPost(f"{path}/a.{os.getpid()}"), torch_here=False),
        ShmConnector(SocketPost(f"{path}/b.{os.getpid()}"), torch_here=False),
    )


@pytest.fixture(params=[inline_pair, shm_pair], ids=["inline", "shm"])
def with_pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[Callable[[Connector, Connector], Coroutine[Any, Any, None]]], None]:
    def run(body: Callable[[Connector, Connector], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            sender, receiver = request.param(tmp_path)
            for connector in (sender, receiver):
                connector.post.listen(lambda message, payload, connector=connector: connector.handle(message, payload))
            try:
                async with asyncio.timeout(20):
                    await body(sender, receiver)
            finally:
                sender.post.close()
                receiver.post.close()

        asyncio.run(main())

    return run


async def settled(connector: Connector) -> None:
    """Wait until nothing is lent any more; the timeout of the test bounds it."""
    while connector.held().get("leased_blocks"):
        gc.collect()
        await asyncio.sleep(0.001)


def mib(count: int, fill: int = 0) -> Payload:
    return Payload(ARRAY, numpy.full(count << 20, fill, numpy.uint8))


def test_chunks_arrive_in_order_and_end_once(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 1 << 20)
        for index in range(100):
            await outlet.put(text(str(index), index=index))
        outlet.finish()
        got = [(await inbox.get()) for _ in range(100)]
        assert [item and (item[0], item[1].data, item[1].meta["index"]) for item in got] == [("e", str(i), i) for i in range(100)]
        assert await inbox.get() is None
        assert await inbox.get() is None

    with_pair(body)


DATA = {
    "text": "grüße 🎺",
    "long text": "ü" * IN_MESSAGE,
    "half a surrogate pair": "a \ud83c b",
    "bytes": b"\x00\xff" * 10,
    "empty": numpy.zeros((0, 3), numpy.float32),
    "scalar": numpy.array(3.5),
    "small": numpy.arange(12, dtype=numpy.int64).reshape(3, 4),
    "strided": numpy.arange(400_000, dtype=numpy.float32).reshape(200, 2000)[::2, ::-3],
    "bool": numpy.arange(50_000) % 3 == 0,
    "complex": numpy.full(9_000, 1 + 2j, numpy.complex64),
    "big": numpy.random.default_rng(0).integers(0, 255, (5 << 20) + 3, numpy.uint8),
    "beyond the pool": numpy.random.default_rng(0).integers(0, 255, LARGEST_KEPT + 17, numpy.uint8),
    "read-only": numpy.frombuffer(bytes(100_000), numpy.uint8),
}


@pytest.mark.parametrize("name", DATA)
def test_data_arrives_as_it_was(with_pair: Any, name: str) -> None:
    data = DATA[name]

    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 1 << 20)
        await outlet.put(Payload(ARRAY, data, {"rate": 5, "names": ["a", None, True, 1.5]}))
        item = await inbox.get()
        assert item is not None
        got = item[1]
        assert got.kind == ARRAY and dict(got.meta) == {"rate": 5, "names": ["a", None, True, 1.5]}
        assert type(got.data) is type(data)
        if isinstance(data, numpy.ndarray):
            assert got.data.dtype == data.dtype and got.data.shape == data.shape
            assert numpy.array_equal(got.data, data)
        else:
            assert got.data == data
        del got, item
        await settled(sender)

    with_pair(body)


def test_what_cannot_travel_is_refused_and_nothing_is_kept(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 1 << 20)
        for data in (numpy.array([object()]), {"a": 1}, numpy.array(["x"]), numpy.float32(1)):
            with pytest.raises(StageError, match="cannot travel"):
                await outlet.put(Payload(ARRAY, data))
        for value in (numpy.float32(1), numpy.float64(1), {1}, {1: 2}, object(), 2**64, b"x", [[numpy.int64(1)]], 1j):
            with pytest.raises(StageError, match=r"Meta of 'array' holds .*cannot travel"):
                await outlet.put(Payload(ARRAY, numpy.zeros(100_000), {"some": value}))
        with pytest.raises(StageError, match="half of a surrogate pair"):
            await outlet.put(Payload(ARRAY, numpy.zeros(100_000), {"some": "\ud800"}))
        await settled(sender)
        await outlet.put(text("after", some=(1, -(2**63), "ü", None, {"a": 1.5})))
        item = await inbox.get()
        assert item is not None and item[1].data == "after"

    with_pair(body)


def test_many_small_chunks_fill_the_window_too(with_pair: Any) -> None:
    """A chunk without bytes needs memory as well: a producer of them waits for a consumer that does not read."""

    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 64 << 10)

        async def produce() -> None:
            for _ in range(300):
                await outlet.put(text(""))
            outlet.finish()

        producing = asyncio.create_task(produce())
        await asyncio.sleep(0.1)
        assert not producing.done()
        count = 0
        while await inbox.get() is not None:
            count += 1
        await producing
        assert count == 300

    with_pair(body)


def test_a_full_window_holds_the_producer_until_the_consumer_takes(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 4 << 20)
        sent = 0

        async def produce() -> None:
            nonlocal sent
            for _ in range(12):
                await outlet.put(mib(1))
                sent += 1
            outlet.finish()

        producing = asyncio.create_task(produce())
        await asyncio.sleep(0.2)
        assert sent == 4
        count = 0
        while await inbox.get() is not None:
            count += 1
        await producing
        assert count == sent == 12
        await settled(sender)

    with_pair(body)


def test_a_chunk_larger_than_the_window_passes_alone(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 1000)

        async def produce() -> None:
            for fill in range(3):
                await outlet.put(mib(2, fill))
            outlet.finish()

        producing = asyncio.create_task(produce())
        fills = []
        while (item := await inbox.get()) is not None:
            fills.append(int(item[1].data[7]))
        await producing
        assert fills == [0, 1, 2]

    with_pair(body)


def test_a_consumer_may_keep_all_chunks(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 2 << 20)

        async def produce() -> None:
            for fill in range(20):
                await outlet.put(mib(1, fill))
            outlet.finish()

        producing = asyncio.create_task(produce())
        kept = []
        while (item := await inbox.get()) is not None:
            kept.append(item[1].data)
        await producing
        assert [int(data[-1]) for data in kept] == list(range(20))
        kept.clear()
        await settled(sender)

    with_pair(body)


def test_a_join_that_reads_one_input_first_does_not_deadlock(with_pair: Any) -> None:
    """One producer feeds two flows in turn; the consumer reads one to its end, then the other. Both exceed their windows."""

    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["first", "second"])
        first = sender.connect("r", "first", receiver.post.address, 2 << 20)
        second = sender.connect("r", "second", receiver.post.address, 2 << 20)

        async def produce() -> None:
            for fill in range(10):
                await second.put(mib(1, fill))
                await first.put(mib(1, fill))
            first.finish()
            second.finish()

        producing = asyncio.create_task(produce())
        for edge in ("first", "second"):
            fills = []
            while (item := await inbox.get([edge], ["first", "second"])) is not None:
                fills.append(int(item[1].data[0]))
            assert fills == list(range(10))
        await producing
        del item
        await settled(sender)

    with_pair(body)


def test_chunks_nobody_expects_are_freed_and_their_producer_goes_on(with_pair: Any) -> None:
    """F103: what comes after an abort is dropped."""

    async def body(sender: Connector, receiver: Connector) -> None:
        outlet = sender.connect("r", "e", receiver.post.address, 1 << 20)
        for _ in range(20):
            await outlet.put(mib(1))
        await settled(sender)
        sender.close("r")
        assert not any(sender.held().values()) and not any(receiver.held().values())

    with_pair(body)


def test_a_consumer_that_closes_early_frees_the_producer(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 1 << 20)
        await outlet.put(mib(1))
        waiting = asyncio.create_task(outlet.put(mib(1)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        receiver.close("r")
        await waiting
        with pytest.raises(AbortedError):
            await inbox.get()
        await settled(sender)

    with_pair(body)


def test_closing_at_the_producer_wakes_a_waiting_put(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 1 << 20)
        await outlet.put(mib(1))
        waiting = asyncio.create_task(outlet.put(mib(1)))
        await asyncio.sleep(0.05)
        sender.close("r")
        with pytest.raises(AbortedError):
            await waiting
        receiver.close("r")
        await settled(sender)

    with_pair(body)


def test_a_gap_is_an_error(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        receiver.handle(Chunk("r", "e", number=1, sender=sender.post.address, kind="text", container="text"), b"late")
        with pytest.raises(StageError, match="Chunk 0 of e is missing"):
            await inbox.get()

    with_pair(body)


def test_an_error_reaches_every_reader(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["a", "b"])
        readers = [asyncio.create_task(inbox.get([edge])) for edge in ("a", "b")]
        await asyncio.sleep(0)
        inbox.fail(OmniError("broken"))
        for reader in readers:
            with pytest.raises(OmniError, match="broken"):
                await reader

    with_pair(body)


def test_the_blocks_of_a_dead_consumer_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = shm_pair(tmp_path)
        for connector in (sender, receiver):
            connector.post.listen(lambda message, payload, connector=connector: connector.handle(message, payload))
        inbox = receiver.expect("r", ["e"])
        outlet = sender.connect("r", "e", receiver.post.address, 8 << 20)
        for _ in range(3):
            await outlet.put(mib(1))
        kept = await inbox.get()
        assert kept is not None and sender.held()["leased_blocks"] == 3
        sender.forget(receiver.post.address)
        assert sender.held()["leased_blocks"] == 0
        await outlet.put(mib(1))  # goes nowhere, and says nothing
        sender.post.close()
        receiver.post.close()

    asyncio.run(main())


def test_a_block_is_not_lent_again_while_a_thread_still_writes_it(tmp_path: Path) -> None:
    """The consumer dies while its chunk is copied."""

    async def main() -> None:
        sender, receiver = shm_pair(tmp_path)
        outlet = sender.connect("r", "e", receiver.post.address, 64 << 20)
        putting = asyncio.create_task(outlet.put(mib(32)))
        await asyncio.sleep(0)
        sender.forget(receiver.post.address)
        assert sender.held()["leased_blocks"] == 1
        await putting
        assert sender.held()["leased_blocks"] == 0
        sender.post.close()
        receiver.post.close()

    asyncio.run(main())


def test_a_reader_learns_that_its_producer_is_dead(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox, done = receiver.expect("r", ["e"]), receiver.expect("done", ["e"])
        outlet, other = (sender.connect(request, "e", receiver.post.address, 1 << 20) for request in ("r", "done"))
        await outlet.put(text("x"))
        other.finish()
        await inbox.get()
        assert await done.get() is None
        waiting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        receiver.forget(sender.post.address)
        with pytest.raises(UnavailableError, match="went down"):
            await waiting
        assert await done.get() is None  # it had all it was to get

    with_pair(body)


def test_an_error_that_is_raised_does_not_keep_its_inbox(with_pair: Any) -> None:
    async def body(sender: Connector, receiver: Connector) -> None:
        inbox = receiver.expect("r", ["e"])
        inbox.fail(RequestError("broken", param="it"))
        try:
            await inbox.get()
        except RequestError as error:
            assert error.param == "it"
        receiver.close("r")
        gone = weakref.ref(inbox)
        del inbox
        assert gone() is None

    with_pair(body)


def test_a_block_may_be_freed_in_another_thread(tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = shm_pair(tmp_path)
        for connector in (sender, receiver):
            connector.post.listen(lambda message, payload, connector=connector: connector.handle(message, payload))
        inbox = receiver.expect("r", ["e"])
        await sender.connect("r", "e", receiver.post.address, 8 << 20).put(mib(1))
        item = await inbox.get()
        assert item is not None
        held = [item[1].data[5:].view(numpy.uint8)]
        del item
        await asyncio.sleep(0.01)
        assert sender.held()["leased_blocks"] == 1  # the view of a view keeps it
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        async with asyncio.timeout(10):
            await settled(sender)
        sender.post.close()
        receiver.post.close()

    asyncio.run(main())
