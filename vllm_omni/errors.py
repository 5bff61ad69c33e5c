"""What can go wrong, as a client, a script and another process see it.

Every error the project raises on purpose is an `OmniError`. It knows its HTTP status, crosses processes as a plain mapping
(`to_message`, `from_message`; never pickle) and says what, where, and what to do. It does not log and does not retry.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar


class OmniError(Exception):
    """Base of all errors raised on purpose.

    `param` names the request field or the setting at fault; `stage` the stage in which it happened.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, stage: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.stage = stage

    def to_message(self) -> dict[str, str]:
        """This error as plain strings, for another process. Whatever a plugin gave as message or param becomes one."""
        fields = {"type": type(self).__name__, "message": self.message, "param": self.param, "stage": self.stage}
        return {name: str(value).encode(errors="backslashreplace").decode() for name, value in fields.items() if value is not None}


class RequestError(OmniError, ValueError):
    """The request is wrong; nothing was computed for it."""

    status, code = 400, "invalid_request_error"


class AuthenticationError(OmniError, PermissionError):
    """No key, or a wrong one."""

    status, code = 401, "invalid_api_key"


class NotFoundError(OmniError, LookupError):
    """A model, plugin, alias or stored object that does not exist."""

    status, code = 404, "not_found_error"


class AbortedError(OmniError, InterruptedError):
    """The request was aborted by its client or by name."""

    status, code = 499, "aborted"


class StageError(OmniError, RuntimeError):
    """A stage failed while it worked on this request. Other requests go on."""

    status, code = 500, "stage_error"


class UnavailableError(OmniError, ConnectionError):
    """A stage is starting, restarting or gone. The same request may succeed later."""

    status, code = 503, "service_unavailable"


class DeadlineError(OmniError, TimeoutError):
    """The request ran past its time limit and was aborted."""

    status, code = 504, "timeout"


class GraphError(OmniError, ValueError):
    """A stage graph is unsound. The message has every fault, one sentence each."""

    code = "graph_error"


class SettingError(OmniError, ValueError):
    """A recipe, a flag or an environment variable is wrong."""

    code = "setting_error"


class PluginError(OmniError, ImportError):
    """A model plugin is broken, does not fit this core, or clashes with another.

    `repair` is a requirement that mends it when it is installed, "" if none does.
    """

    code = "plugin_error"

    def __init__(self, message: str, *, param: str | None = None, stage: str | None = None, repair: str = "") -> None:
        super().__init__(message, param=param, stage=stage)
        self.repair = repair


_BY_NAME = {cls.__name__: cls for cls in OmniError.__subclasses__()}


def from_message(message: Mapping[str, str]) -> OmniError:
    """The error another process sent; an unknown type becomes a `StageError`."""
    cls = _BY_NAME.get(message.get("type", ""), StageError)
    return cls(message.get("message", "the peer gave no reason"), param=message.get("param"), stage=message.get("stage"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A closing hint, with its leading space: the nearest of `known`, or the list of them, or nothing if there are none.

    >>> did_you_mean("voise", ["voice", "speed"])
    " Did you mean 'voice'?"
    """
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    if not names:
        return ""
    return f" Known: {', '.join(names[:30])}{', …' if len(names) > 30 else ''}."
