"""From a deployment to a running server and back to nothing: the port, the stages, the web application, the signals.

The stages start first, and the web framework is imported while they do. The port answers as soon as that is done, with 503
until a warm-up request went through the whole graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni import __version__
from vllm_omni.errors import OmniError, SettingError, UnavailableError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import VIDEO

if TYPE_CHECKING:
    import uvicorn

    from vllm_omni.deployment import Deployment
    from vllm_omni.serving.jobs import Store
    from vllm_omni.serving.server import Server

log = logging.getLogger("vllm_omni")

GRACE = 10.0
"""Seconds that open requests have to end after a signal; a second signal ends them at once."""


@dataclass(frozen=True, slots=True)
class Options:
    """`keys` of the API; a request that takes longer than `limit` seconds is aborted, a start than `start_limit` (None: no limit).

    Clients may name files below the folder `media`. Jobs and their files are in the folder `store` (None: in the user's state).
    """

    keys: Sequence[str] = ()
    limit: float | None = None
    start_limit: float | None = None
    media: Path | None = None
    store: Path | None = None


def serve(deployment: Deployment, options: Options, *, host: str, port: int, log_level: str) -> int:
    """Serve until SIGINT or SIGTERM, then return 0. A port of 0 takes a free one; `log_level` is one of logging's names.

    Raises SettingError, before anything is started, if the port or a folder cannot be had, and OmniError if a stage or the
    warm-up fails.
    """
    import uvloop

    if options.media is not None and not options.media.is_dir():
        raise SettingError(f"--allowed-local-media-path: there is no folder {options.media}.", param="allowed-local-media-path")
    _log_to_stderr(log_level)
    with (
        _listen(host, port) as listener,
        _store(deployment, options.store, listener) as jobs,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_until_signalled(deployment, listener, options, jobs))


async def _until_signalled(deployment: Deployment, listener: socket.socket, options: Options, jobs: Store | None) -> int:
    force = asyncio.Event()
    life = asyncio.create_task(_live(deployment, listener, options, jobs, force))

    def signalled() -> None:
        if life.cancelling():  # the second one
            force.set()
        else:
            life.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    with contextlib.suppress(asyncio.CancelledError):
        await life
    log.info("Stopped.")
    return 0


async def _live(deployment: Deployment, listener: socket.socket, options: Options, jobs: Store | None, force: asyncio.Event) -> None:
    """One life of a server. Ends when it is cancelled."""
    began = time.monotonic()
    host, port, *_ = listener.getsockname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    stages = ", ".join(stage.name for stage in deployment.graph.stages)
    log.info(
        "vllm-omni %s: %s, graph '%s' on %s: %s", __version__, deployment.model, deployment.graph.name, deployment.recipe.device, stages
    )
    omni = AsyncOmni(deployment)
    starting = asyncio.create_task(omni.start())
    try:
        server, web = await asyncio.to_thread(_assemble, omni, options, jobs)
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        try:
            async with _start_limit(options.start_limit, began, server):
                await starting
                try:
                    await server.warm_up()
                except OmniError as error:
                    raise UnavailableError(f"The warm-up request failed: {error.message}", stage=error.stage) from error
            gc.collect()
            gc.freeze()  # what the start made stays: collections need not look at it again
            log.info("Ready in %.1f s: '%s' at %s", time.monotonic() - began, deployment.served_name, url)
            await asyncio.shield(serving)
        finally:
            await server.drain(GRACE, force)
            web.should_exit = True
            await asyncio.wait((serving,))
    finally:
        starting.cancel()
        await asyncio.wait((starting,))
        await omni.stop()


@contextlib.asynccontextmanager
async def _start_limit(seconds: float | None, began: float, server: Server) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(None if seconds is None else seconds - (time.monotonic() - began)) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        states = ", ".join(f"{name}: {state}" for name, state in server.omni.health().stages.items())
        raise UnavailableError(f"The model was not ready within {seconds:g} s (--init-timeout): {states}.") from None


def _assemble(omni: AsyncOmni, options: Options, jobs: Store | None) -> tuple[Server, uvicorn.Server]:
    """Import and build the web application: a quarter of a second of work, in a thread beside the starting stages."""
    from vllm_omni.serving.app import build, web_server
    from vllm_omni.serving.server import Server

    server = Server(omni, options.limit, options.media, jobs)
    return server, web_server(build(server, options.keys))


def _store(deployment: Deployment, folder: Path | None, listener: socket.socket) -> AbstractContextManager[Store | None]:
    """Where the jobs of this server are kept, closed at the end; none for a model that needs none. Raises SettingError."""
    if VIDEO not in deployment.graph.outputs:
        if folder:
            said = f"--store has no effect: '{deployment.served_name}' gives no video, and nothing else is kept. Leave it out."
            raise SettingError(said, param="store")
        return contextlib.nullcontext()
    from vllm_omni.serving.jobs import Store

    name = re.sub(r"[^\w.-]+", "-", deployment.served_name).strip("-.") or "model"
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return contextlib.closing(Store(folder or state / "vllm-omni" / f"{name}-{listener.getsockname()[1]}"))


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises SettingError with the reason and the remedy."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise SettingError(f"The host '{host}' is not known: {error.strerror}.", param="host") from None
    except OverflowError:
        raise SettingError(f"There is no port {port}: ports are 0 (any free one) to 65535.", param="port") from None
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({os.strerror(error.errno or 0)})"
        raise SettingError(f"Port {port} of {host} {reason}: choose another with --port.", param="port") from None


def _log_to_stderr(level: str) -> None:
    """Our own lines at `level`; of others only warnings; of the web server nothing, unless debugging: its faults are told by us."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S", level=max(logging.WARNING, number))
    log.setLevel(number)
    logging.getLogger("uvicorn.error").setLevel(number if level == "debug" else logging.CRITICAL)
