"""The hooks: behaviour that an installed distribution may add. Data about a model family belongs in a ModelPlugin instead.

A distribution names a module (or any object with hook implementations) in the entry-point group `vllm_omni.hooks` and marks its
functions with `hookimpl`. A hook is added here when it gets its first user. This module loads no web framework.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import importlib_metadata
import pluggy

from vllm_omni.errors import PluginError

if TYPE_CHECKING:
    from fastapi import APIRouter

    from vllm_omni.deployment import Deployment
    from vllm_omni.payload import Payload
    from vllm_omni.request import Request

GROUP = "vllm_omni.hooks"
hookspec = pluggy.HookspecMarker("vllm_omni")
hookimpl = pluggy.HookimplMarker("vllm_omni")


class Server(Protocol):
    """What an endpoint is given to work with."""

    deployment: Deployment
    """The model that is served: its graph says what it takes, gives, and lets a client set."""

    def stream(self, request: Request) -> AsyncGenerator[Payload, None]:
        """Run a request: its outputs as they come. Closing the generator aborts it in every stage. Raises OmniError."""


@hookspec
def vllm_omni_endpoints(server: Server) -> Sequence[APIRouter]:  # type: ignore[empty-body]
    """Endpoints to serve: each a protocol turned into Requests and back.

    Called once, when the server is built; `server` runs the requests. Returns FastAPI routers, none if the model does not fit
    the protocol. A path that is already taken stops the server. The API key, the size limit, the metrics and OpenAI's shape of
    an error apply to every endpoint; `vllm_omni.serving.reply` has answers that end when their client is gone.
    """


@hookspec(firstresult=True)
def vllm_omni_attention(device: str, dtype: Any, head_dim: int) -> Any:
    """The attention for packed sequences of tensors of torch's `dtype` on a `device`, the platform's name.

    Heads have `head_dim` numbers. Called in a stage's process, once for each kind of tensors.
    Returns a `vllm_omni.kit.attention.Attention`, or None: others know.
    """


def plugins() -> pluggy.PluginManager:
    """A manager that knows the hooks above and has loaded every installed implementation of them.

    Raises PluginError, with the distribution, the entry and the cause, for one that does not load or does not fit a hook.
    """
    manager = pluggy.PluginManager("vllm_omni")
    manager.add_hookspecs(sys.modules[__name__])
    for entry in importlib_metadata.entry_points(group=GROUP):
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        try:
            manager.register(entry.load(), name=owner)
            manager.check_pending()
        except Exception as error:
            raise broken(owner, error) from error
    return manager


def broken(owner: str, error: Exception) -> PluginError:
    """What is said of an implementation that raised `error`: never skipped, or what it guards would be open."""
    return PluginError(f"The hooks of {owner} are broken: {type(error).__name__}: {error}. Repair or uninstall it.")
