"""What a client asked for, whichever protocol it came by.

Holds the conversation, the kinds of output wanted, and the parameters the client *gave*; defaults are not filled in here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.payload import Kind, Payload, text


def new_id(prefix: str = "req") -> str:
    """An id no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `content` is what was said, in order: text, pictures, sound."""

    role: str
    content: tuple[Payload, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request.

    `outputs` are the kinds wanted (empty: text if the model gives it, else the first that it names). `params` are the values the client
    gave, by name; the stages declare which exist. `timeout` is in seconds (None: no limit).
    """

    messages: tuple[Message, ...]
    outputs: tuple[Kind, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    id: str = field(default_factory=new_id)

    @classmethod
    def of(cls, prompt: str, **fields: Any) -> Request:
        """A request of one user message of text."""
        return cls(messages=(Message("user", (text(prompt),)),), **fields)

    def payloads(self) -> Iterator[Payload]:
        """The conversation as chunks; meta `role` and `turn` (the message's index) keep its shape."""
        for turn, message in enumerate(self.messages):
            for part in message.content:
                yield Payload(part.kind, part.data, {**part.meta, "role": message.role, "turn": turn})
