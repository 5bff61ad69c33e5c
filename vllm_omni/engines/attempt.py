"""What a thread of an engine tried, and how its outcome gets back to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def attempt(call: Callable[[], Any]) -> Any:
    """What the call returns, or the exception it raises."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - the plugin's code, in its thread: its start or one request fails with it
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return _fault(error)  # the others mean something to an event loop


def _fault(error: BaseException) -> RuntimeError:
    fault = RuntimeError(repr(error)).with_traceback(error.__traceback__)
    error.__traceback__ = None
    return fault


def resolve(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """In the event loop: settle each future that still waits, with its result or with the exception that came in its place."""
    for done, result in results:
        if done.done():
            continue
        if isinstance(result, Exception):
            done.set_exception(result)
        else:
            done.set_result(result)
