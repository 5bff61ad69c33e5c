"""What runs a stage, seen from outside: the contract between the core and its engines, and between an engine and a plugin.

Interfaces only. The engines are in `vllm_omni/engines/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from vllm_omni.errors import OmniError, RequestError
from vllm_omni.payload import Kind, Payload


@dataclass(frozen=True, slots=True)
class StageContext:
    """What an engine is started with. `model` is the checkpoint's folder ("" without weights); `takes` and `gives` name kinds.

    `memory` is the dotted name of a function of a StageContext and a Job (None: nothing but a start) that gives the Memory they need, from
    what the checkpoint says of itself, without loading it; "" if nobody knows.
    """

    stage: str
    target: str
    model: str = ""
    device: str = "cpu"
    devices: tuple[int, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    vllm: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    memory: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One request at one stage: its id, the stage's parameters (all that are declared; None: unset), and the kinds wanted of the stage.

    `outputs` are those that the client asked for.
    """

    request: str
    params: Mapping[str, Any] = field(default_factory=dict)
    wants: tuple[Kind, ...] = ()
    outputs: tuple[Kind, ...] = ()


class Engine(Protocol):
    """Runs one stage. Built with a StageContext; every method is called on the stage's event loop.

    It calls `lost`, there too, when it can take no more jobs: a stage with a process of its own is then started anew.
    """

    lost: Callable[[], None]

    async def start(self) -> None:
        """Load. Returns when the first job may come."""

    def stream(self, job: Job, inputs: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
        """Work on a job: an async generator. Closing it aborts the job within one step and frees all its state."""

    def held(self) -> Mapping[str, int]:
        """How many entries each per-request map holds. All zero when no job is open."""

    async def stop(self) -> None:
        """End. Open jobs are closed first."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Yielded by `OneShotModule.flush` instead of a chunk: pull this row again after `seconds`; other rows go on meanwhile."""

    seconds: float


class OneShotModule:
    """The class a plugin writes for a OneShot stage. `run` is called in one thread, never twice at once.

    A state holds what a stream carries from chunk to chunk (a codec's left context). The default has none.
    """

    def load(self, ctx: StageContext) -> None:
        """Load weights; called once."""

    def open(self, job: Job) -> Any:
        """A new state for a job. Raise RequestError to refuse it."""
        return None

    def shape_key(self, state: Any, payload: Payload) -> Any:
        """Rows share a call when their keys are equal. The default lets all rows share."""
        return None

    def run(self, rows: Sequence[tuple[Any, Payload]]) -> Sequence[Sequence[Payload] | OmniError]:
        """One call: for each row (state, chunk) the chunks it gives, or the error that ends this row alone.

        If a call raises, its rows are run again one by one, so a state must not change before its row can no longer fail.
        """
        raise NotImplementedError

    def flush(self, state: Any) -> Iterable[Payload | Pause]:
        """The chunks still owed when the input has ended.

        Pulled one item at a time in the thread of `run`, between the calls of other rows, and each chunk leaves at once: a
        generator here streams. An abort closes it between two items. What it raises ends this row alone.
        """
        return ()

    def close(self, state: Any) -> None:
        """Free a state: the job has ended, failed or was aborted."""


@dataclass(slots=True, eq=False)
class Row:
    """One sample that a Denoise stage makes for a job.

    `tokens` float32 [tokens, channels] is what it begins with: noise, and conditions in their places. `solver` is one of
    `vllm_omni.kit.solvers`, and `times` are what the model takes for each of its steps. `passes` is what `DenoiseModule.predict` needs to
    know of this row: once for each prompt, with guidance first the one to go to and then the one to go away from. `mask`
    [tokens, channels] is 0 for numbers that stay as they are. After each of the `previews` (counts of steps) what would come of it is
    finished, too, and its chunks have meta `partial`: 0, 1, … `state` is the plugin's own.
    """

    tokens: Any
    solver: Any
    times: Sequence[float]
    passes: Sequence[Any]
    guidance: float = 1.0
    mask: Any = None
    previews: Sequence[int] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What a stage needs on its device, in bytes: for its weights, for a job as long as it is open, and beside that during a forward."""

    weights: int
    job: int = 0
    workspace: int = 0


class DenoiseModule:
    """The class a plugin writes for a Denoise stage. Its methods are called in one thread, never two at once.

    Solver, guidance, packing and admission are the engine's.
    """

    def load(self, ctx: StageContext) -> None:
        """Load weights; called once."""

    def prepare(self, job: Job, parts: Sequence[Payload]) -> Iterable[Row | None]:
        """The rows of a job, with all that does not depend on the noise computed. Raise RequestError to refuse it.

        A generator may yield None between them any number of times: others may get their turn there.
        """
        raise NotImplementedError

    def pack(self, passes: Sequence[Any]) -> Any:
        """What `predict` takes of passes that are to share their forwards, until one comes or goes."""
        return passes

    def predict(self, packed: Any, tokens: Any, times: Any) -> Iterable[Any]:
        """Yield the velocities [tokens, channels], noise - data, of the `tokens` of all passes of a pack, in their order.

        `times` [passes]. Before that, None may be yielded any number of times: others may get their turn there. Must change nothing.
        """
        raise NotImplementedError

    def finish(self, row: Row, tokens: Any) -> Iterable[Payload]:
        """The chunks that a row gives: of its `tokens` as they are after all steps, or as a preview has them."""
        raise NotImplementedError


class ARModule:
    """The class a plugin writes for an AR stage. As it is, it is a language model that answers the conversation it is given."""

    model: ClassVar[str] = ""
    """The dotted name of a model class of the plugin's (`package.module:Class`); "" for the one vLLM has for the checkpoint.

    A class that gives more than tokens is a `vllm_omni.kit.ar_model.HookedModel`.
    """

    def load(self, ctx: StageContext) -> Mapping[str, Any]:
        """The engine arguments that vLLM is started with, by vLLM's names; those of a recipe come before them.

        Called once, before vLLM starts. May take its time: to convert a checkpoint, say.
        """
        return {"model": ctx.model} if ctx.model else {}

    def ready(self, job: Job, parts: Sequence[Payload]) -> Sequence[Payload] | None:
        """The answer, if nothing needs to be generated for it. A client's text with meta `verbatim` is to be said, not answered."""
        return None

    def prompt(self, job: Job, parts: Sequence[Payload], tokenizer: Any) -> list[int]:
        """The token ids to go on from: the conversation `parts` by the checkpoint's chat template.

        `tokenizer` is transformers'. Called in a thread beside the one that generates. Raise RequestError to refuse a job.
        """
        turns: dict[int | None, tuple[str, list[str]]] = {}
        for part in parts:  # a client's have a turn and stand in lines of their own; another stage's are pieces of one text
            role = str(part.meta.get("role", "user"))
            turns.setdefault(part.meta.get("turn"), ("system" if role == "developer" else role, []))[1].append(part.data)
        messages = [{"role": role, "content": ("" if turn is None else "\n").join(said)} for turn, (role, said) in turns.items()]
        if not messages:
            return []
        if tokenizer.chat_template is None:
            if len(messages) > 1:
                raise RequestError("This checkpoint has no chat template: send one message, to be continued.", param="messages")
            return list(tokenizer.encode(messages[0]["content"]))
        from jinja2 import TemplateError

        try:
            shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError(f"The checkpoint's chat template refuses this conversation: {error}.", param="messages") from error
        return list(tokenizer.encode(shown, add_special_tokens=False))
