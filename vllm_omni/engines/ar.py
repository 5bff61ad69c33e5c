"""Runs an AR stage: vLLM's engine in this process, stepped by a thread of its own.

Prompts are tokenised in another thread, so that a long one does not hold up the tokens of others. What a request has generated
while the event loop was busy leaves as one chunk. Only `compat/` knows vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.engine import ARModule, Job, StageContext
from vllm_omni.engines.attempt import attempt, resolve
from vllm_omni.engines.load import load_object
from vllm_omni.errors import OmniError, RequestError, StageError, UnavailableError
from vllm_omni.payload import TEXT, Kind, Payload, text
from vllm_omni.sampling import SAMPLING

log = logging.getLogger(__name__)

PRELOAD = ("numpy", "vllm_omni.compat.preload", "vllm_omni.compat.engine")
"""What the forkserver imports for stages of this engine."""

_GATHER = 0.001
"""Seconds that an idle engine waits for each further job that is open already: its first step then serves all of them."""
_SAMPLED = tuple(param.name for param in SAMPLING)
_SWITCH = 0.0005
"""Seconds after which the event loop lets the step thread go on, if Python has not switched by itself."""


@dataclass(slots=True, eq=False)
class _Row:
    """A job in the engine, as the event loop sees it: what was generated and is not sent yet, and how it ended."""

    id: str
    prompt_tokens: int = 0
    aborted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    made: list[Any] = field(default_factory=list)
    emitted: list[Payload] = field(default_factory=list)
    error: Exception | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class _Order:
    """Something for the step thread to do for a row. What goes wrong ends that row alone."""

    row: _Row
    call: Callable[[], None]


_News = tuple[_Row, Any, OmniError | None]
"""What a step gave to a row: vLLM's output for it, or the error that ends it."""


class AREngine:
    """The engine of a stage whose target is an `ARModule`."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._module: ARModule
        self._engine: Any = None
        self._dead = ""
        self._coming: set[_Row] = set()
        self.lost: Callable[[], None] = lambda: None
        self._rows: dict[str, _Row] = {}
        self._numbers = itertools.count()
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{context.stage}-prompts")

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(started,), name=f"stage-{self._context.stage}", daemon=True)
        self._thread.start()
        await started

    async def stream(self, job: Job, inputs: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
        if self._dead:
            raise UnavailableError(f"{self._dead}; start it anew.")
        row = _Row(f"{job.request}~{next(self._numbers)}")
        self._rows[row.id] = row
        self._coming.add(row)
        counts: dict[str, Any] = {"tokens": 0}
        try:
            parts = [payload async for payload in inputs]
            self._reader.submit(self._read, row, job, parts)
            while not row.over:
                await row.news.wait()
                row.news.clear()
                made, row.made = row.made, []
                emitted, row.emitted = row.emitted, []
                for payload in emitted:
                    yield payload
                counts["tokens"] += sum(len(output.token_ids) for output in made)
                said = "".join(output.text for output in made)
                if row.over and made:
                    counts["finish_reason"] = made[-1].finish_reason
                if said or "finish_reason" in counts:
                    if row.prompt_tokens:
                        counts["prompt_tokens"], row.prompt_tokens = row.prompt_tokens, 0
                    yield text(said, **counts)
                    counts = {"tokens": 0}
            if row.error is not None:
                raise row.error
        finally:
            if row.over or self._dead:
                del self._rows[row.id]
            else:
                row.aborted = True
                self._orders.put(_Order(row, lambda: self._abort(row)))

    def _read(self, row: _Row, job: Job, parts: list[Payload]) -> None:
        """In the reader's thread: from the parts of a prompt to an order for the step thread, or to what ends the row."""
        failure = attempt(lambda: self._order(row, job, parts))
        if failure is not None:
            self._coming.discard(row)
            self._tell([(row, None, self._fault(failure))])

    def _order(self, row: _Row, job: Job, parts: list[Payload]) -> None:
        if (ready := self._module.ready(job, parts)) is not None:
            self._coming.discard(row)
            self._loop.call_soon_threadsafe(_give, row, ready)
            return
        self._check(parts)
        prompt = [] if row.aborted else self._module.prompt(job, parts, self._engine.tokenizer)
        if not prompt:
            raise RequestError("There is nothing to go on from: the prompt is empty.", param="messages")
        sampling = self._engine.sampling({name: job.params.get(name) for name in _SAMPLED}, row.id)
        row.prompt_tokens = len(prompt)
        self._orders.put(_Order(row, lambda: self._add(row, prompt, sampling)))

    def _check(self, parts: list[Payload]) -> None:
        """Refuses what cannot be a prompt before it is tokenised: that takes seconds for megabytes, and others wait behind it."""
        texts = [part.data for part in parts if part.kind == TEXT]
        length, most = sum(map(len, texts)), self._engine.most_characters
        if length > most:
            context = self._engine.context
            raise RequestError(f"The prompt has {length} characters; {context} tokens of context hold at most {most}.", param="messages")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The prompt is no text: {error.reason} at character {error.start}.", param="messages") from error

    def held(self) -> Mapping[str, int]:
        engine = self._engine
        return {"rows": len(self._rows), "kv_blocks": engine.blocks_in_use() if engine is not None else 0}

    async def stop(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, 5.0)

    # The rest runs in the step thread.

    def _main(self, started: asyncio.Future[None]) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH))
        failure = attempt(self._load)
        self._loop.call_soon_threadsafe(resolve, [(started, failure)])
        if failure is not None:
            return
        while self._work():
            pass
        self._engine.shutdown()

    def _load(self) -> None:
        import vllm_omni.compat.preload  # noqa: F401 - vLLM reads the environment when it is imported
        from vllm_omni.compat.engine import InProcessEngine

        self._module = load_object(self._context.target)()
        model = load_object(self._module.model) if self._module.model else None
        self._engine = InProcessEngine({**self._module.load(self._context), **self._context.vllm}, model)

    def _work(self) -> bool:
        """Follow the orders, waiting for one if there is nothing else to do, then one step. False if one says to stop."""
        idle = not self._engine.busy
        while not self._engine.busy or not self._orders.empty() or (idle and self._coming):
            try:
                order = self._orders.get(timeout=_GATHER if self._engine.busy else None)
            except queue.Empty:
                break
            if order is None:
                return False
            try:
                order.call()
            except Exception as error:  # noqa: BLE001 - a request that vLLM does not take
                self._tell([(order.row, None, self._fault(error))])
        try:
            outputs = self._engine.step()
            emitted = [(row, Payload(Kind(kind), *what)) for name, kind, *what in self._engine.take() if (row := self._rows.get(name))]
        except Exception as error:  # noqa: BLE001 - a step is shared by all rows: all of them fail, and the stage
            return self._die(error)
        news = [(row, output, None) for output in outputs if (row := self._rows.get(output.request_id))]
        if news or emitted:
            self._tell(news, emitted)
        return True

    def _add(self, row: _Row, prompt: list[int], sampling: Any) -> None:
        self._coming.discard(row)
        if not row.aborted:
            self._engine.add(row.id, prompt, sampling)

    def _abort(self, row: _Row) -> None:
        self._coming.discard(row)
        self._engine.abort(row.id)
        self._loop.call_soon_threadsafe(self._rows.pop, row.id, None)

    def _die(self, error: Exception) -> bool:
        """A step that raised leaves an engine in an unknown state: its rows fail, and so does the stage."""
        log.error("Stage %s failed in a step.", self._context.stage, exc_info=error)
        self._loop.call_soon_threadsafe(self._mourn, error)
        return False

    def _mourn(self, error: Exception) -> None:
        """In the event loop."""
        self._dead = f"Stage '{self._context.stage}' died of a {type(error).__name__} in a step of its engine"
        _deliver([(row, None, self._fault(error)) for row in self._rows.values()], ())
        self._loop.call_soon(self.lost)  # when the rows have been told

    def _fault(self, error: Exception) -> OmniError:
        if isinstance(error, OmniError):
            return error
        return StageError(f"Stage '{self._context.stage}' failed: {type(error).__name__}: {error}")

    def _tell(self, news: Sequence[_News], emitted: Sequence[tuple[_Row, Payload]] = ()) -> None:
        self._loop.call_soon_threadsafe(_deliver, news, emitted)


def _give(row: _Row, ready: Sequence[Payload]) -> None:
    row.emitted += ready
    row.over = True
    row.news.set()


def _deliver(news: Sequence[_News], emitted: Sequence[tuple[_Row, Payload]]) -> None:
    """In the event loop: what a step gave to each row."""
    for row, payload in emitted:
        row.emitted.append(payload)
        row.news.set()
    for row, output, error in news:
        if output is not None:
            row.made.append(output.outputs[0])
            row.over = output.finished
            if row.made[-1].finish_reason == "error":
                error = StageError("vLLM ended this request with an error; its log says which.")
        if error is not None:
            row.error, row.over = error, True
        row.news.set()
