"""What processes say to each other: plain data, the same inside a process and between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from vllm_omni.errors import StageError


def client_id(request: str) -> str:
    """The id a client knows a request by. In messages each attempt has an id of its own, so that nothing late is taken for it."""
    return request.rpartition("~")[0]


def check_plain(name: str, value: Any) -> None:
    """Raises StageError, with `name`, for a value that would not arrive as it is: one that is not plain data."""
    kind = type(value)
    if kind in (list, tuple):
        for item in value:
            check_plain(name, item)
    elif kind is dict and all(type(key) is str for key in value):
        for item in (*value, *value.values()):
            check_plain(name, item)
    elif kind is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise StageError(f"{name} has half of a surrogate pair in {value!r:.80}, which is no text.") from None
    elif kind not in (str, float, bool, type(None)) and not (kind is int and -(2**63) <= value < 2**64):
        raise StageError(
            f"{name} holds {value!r:.80} of type {kind.__name__}, which cannot travel between stages; "
            "give str, int (of 64 bits), float, bool, None, or lists or maps of them, with text as keys."
        )


@dataclass(slots=True)
class Receive:
    """A flow a stage will receive: its edge, its name in the bridge's inputs, and the bridge's dotted name ("": none)."""

    edge: str
    key: str
    bridge: str = ""


@dataclass(slots=True)
class Send:
    """A flow a stage sends: chunks of `kind` go to the process at address `to`."""

    edge: str
    kind: str
    to: str
    window: int


@dataclass(slots=True)
class Open:
    """Orchestrator to stage: a job, of a request for `outputs`. The stage answers `Opened` once its flows are registered."""

    request: str
    params: dict[str, Any]
    receives: list[Receive]
    sends: list[Send]
    outputs: list[str]
    reply: str


@dataclass(slots=True)
class Opened:
    request: str
    stage: str


@dataclass(slots=True)
class Abort:
    """Orchestrator to stage: end this job and free its state."""

    request: str


@dataclass(slots=True)
class Done:
    """Stage to orchestrator: the job has ended. Times are monotonic seconds; `first` is 0 when nothing was given."""

    request: str
    stage: str
    queued: float
    first: float
    done: float
    error: dict[str, str] | None = None


@dataclass(slots=True)
class Block:
    """Where the bytes of a chunk lie: a range of the anonymous memory file `fd` of process `pid`.

    A consumer keeps its mapping of the file, unless the file is made for this chunk alone (`once`).
    """

    id: int
    pid: int
    fd: int
    size: int
    offset: int
    once: bool


@dataclass(slots=True)
class Chunk:
    """The header of one chunk. `number` counts from 0 on each flow; `container` says what the data was (see `tensors.py`)."""

    request: str
    edge: str
    number: int
    sender: str
    last: bool = False
    kind: str = ""
    container: str = ""
    dtype: str = ""
    shape: list[int] = field(default_factory=list)
    nbytes: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    block: Block | None = None


@dataclass(slots=True)
class Credit:
    """Consumer to producer: this many bytes were taken off the flow."""

    request: str
    edge: str
    nbytes: int


@dataclass(slots=True)
class Want:
    """Producer to consumer: the window is full; give credit at once from now on."""

    request: str
    edge: str


@dataclass(slots=True)
class Closed:
    """Consumer to producer: this flow takes nothing more."""

    request: str
    edge: str


@dataclass(slots=True)
class Release:
    """Consumer to producer: these blocks are free again."""

    blocks: list[int]


@dataclass(slots=True)
class Gone:
    """Orchestrator to stage: the process at this address is dead."""

    address: str


@dataclass(slots=True)
class Ready:
    """Stage to orchestrator: started (or, with `error`, not)."""

    replica: str
    address: str
    error: dict[str, str] | None = None


@dataclass(slots=True)
class Ask:
    """Orchestrator to stage: how much do you hold? Answered by `Held`."""

    number: int
    reply: str


@dataclass(slots=True)
class Held:
    number: int
    replica: str
    held: dict[str, int]


@dataclass(slots=True)
class Stop:
    """Orchestrator to stage: close all jobs and end."""


Message = Open | Opened | Abort | Done | Chunk | Credit | Want | Closed | Release | Gone | Ready | Ask | Held | Stop
MESSAGES: tuple[type[Message], ...] = get_args(Message)
