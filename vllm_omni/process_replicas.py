"""One process per stage replica, forked from a prepared one, watched without polling, restarted with backoff."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm_omni.connectors.flows import Connector
from vllm_omni.connectors.messages import Gone, Message, Ready, Stop
from vllm_omni.connectors.post import Post
from vllm_omni.connectors.shm import ShmConnector
from vllm_omni.connectors.sockets import SocketPost
from vllm_omni.deployment import Deployment
from vllm_omni.engines import forkserver
from vllm_omni.errors import OmniError, UnavailableError, from_message
from vllm_omni.platform import platform
from vllm_omni.replicas import Replica, check_connectors, context_of, replicas_of

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0
"""Seconds before a restart: doubled each time, from the first again once a replica has lived through the longest."""
LAST_WORDS = 0.5
"""Seconds in which the message of a stage that ended while it started may still arrive."""
STOP_TIME = 5.0
"""Seconds a stage has to close its jobs before it is killed."""


class ProcessReplicas:
    """The replicas of a deployment in processes of their own."""

    def __init__(self, deployment: Deployment) -> None:
        check_connectors(deployment, "shm")
        self._deployment = deployment
        self.replicas = replicas_of(deployment)
        self._by_name = {replica.name: replica for replica in self.replicas}
        self.lost: Callable[[Replica, str, str], None] = lambda replica, address, reason: None
        self._directory = tempfile.mkdtemp(prefix="vllm-omni-", dir=_short_folder(self.replicas))
        self._started: dict[str, asyncio.Future[None]] = {}
        self._attempts: dict[str, tuple[int, float]] = {}
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self.post: Post = SocketPost(f"{self._directory}/client.{os.getpid()}")
        self.connector: Connector = ShmConnector(self.post, torch_here=False)
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._launches = itertools.count()
        self._ended: dict[str, asyncio.Future[None]] = {}

    async def start(self) -> None:
        """Start all replicas. Raises the error of the first that cannot start."""
        self._start_server()
        for replica in self.replicas:
            self._started[replica.name] = self._loop.create_future()
            self._launch(replica)
        await asyncio.gather(*self._started.values())

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A session of its own: what is sent to this process's group, SIGKILL too, leaves it alive to clean up behind it.
            self._server = subprocess.Popen(
                [sys.executable, "-P", forkserver.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        ours.setblocking(False)
        self._channel = ours
        path = [folder for folder in sys.path if isinstance(folder, str)]  # as the import system does
        self._tell({"path": path, "directory": self._directory, "engines": sorted({r.stage.spec.engine for r in self.replicas})})
        self._loop.add_reader(ours.fileno(), self._hear)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            if self._channel is not None:
                self._channel.send(json.dumps(message).encode())
        except ConnectionError:
            pass  # its end will be read next

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self._server_ended()
            return
        message = json.loads(data)
        if "started" in message:
            self._by_name[message["started"]].pid = message["pid"]
        else:
            self._replica_ended(self._by_name[message["ended"]], message["reason"])

    def _server_ended(self) -> None:
        assert self._channel is not None
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        self._channel = None
        if self._server is not None:
            self._server.wait()
        if not self._stopping:
            log.error("The forkserver ended; its stages end with it.")
        for replica in self.replicas:
            if replica.pid or replica.state == "starting":
                self._replica_ended(replica, "ended with the forkserver")

    def _launch(self, replica: Replica) -> None:
        if self._channel is None:
            self._start_server()
        replica.state = "starting"
        context = context_of(self._deployment, replica.stage)
        self._tell({
            "replica": replica.name,
            "engine": replica.stage.spec.engine,
            "context": asdict(context),
            "address": f"{self._directory}/{replica.name}.{next(self._launches)}",
            "reply": self.post.address,
            "log_level": logging.getLogger("vllm_omni").getEffectiveLevel(),
            "env": dict(platform(self._deployment.recipe.device).visible_devices_env(context.devices)),
        })  # fmt: skip

    def _replica_ended(self, replica: Replica, reason: str) -> None:
        address, replica.address, replica.pid = replica.address, "", 0
        ended = self._ended.pop(replica.name, None)
        if ended is not None and not ended.done():
            ended.set_result(None)
        if address:
            self.lost(replica, address, reason)
            self.connector.forget(address)
            for other in self.replicas:
                if other.address:
                    self.post.send(other.address, Gone(address))
        if self._stopping:
            return
        started = self._started.get(replica.name)
        if started is not None and not started.done():
            # Its own word on why it cannot start may still be on the way: that says more than its exit code.
            error = UnavailableError(f"Stage '{replica.stage.name}' {reason} while it started.", stage=replica.stage.name)
            self._loop.call_later(LAST_WORDS, _fail, started, error)
            return
        attempts, since = self._attempts.get(replica.name, (0, 0.0))
        if time.monotonic() - since > LONGEST_DELAY:
            attempts = 0
        delay = min(FIRST_DELAY * 2**attempts, LONGEST_DELAY)
        self._attempts[replica.name] = (attempts + 1, time.monotonic() + delay)
        # A replica that could not start has said why; that says more than its exit code.
        reason = replica.state.removeprefix("failed: ") if replica.state.startswith("failed: ") else reason
        replica.state = f"down: {reason}, restarting in {delay:.1f} s"
        log.error("Stage %s is down: %s; restarting in %.1f s.", replica.name, reason, delay)
        self._loop.call_later(delay, self._relaunch, replica)

    def _relaunch(self, replica: Replica) -> None:
        if not self._stopping:
            self._launch(replica)

    def handle(self, message: Message) -> bool:
        if not isinstance(message, Ready):
            return False
        replica = self._by_name[message.replica]
        started = self._started[replica.name]
        if replica.state != "starting":  # it has died since
            return True
        if message.error is None:
            replica.address, replica.state = message.address, "ready"
            if started.done():
                log.warning("Stage %s is ready again.", replica.name)
            else:
                started.set_result(None)
        else:
            error: OmniError = from_message(message.error)
            replica.state = f"failed: {error.message}"
            if not started.done():
                started.set_exception(error)
        return True

    async def stop(self) -> None:
        """End all stages: those that work are asked first, and whatever is left is killed, after STOP_TIME at the latest."""
        self._stopping = True
        working = [replica for replica in self.replicas if replica.address]
        self._ended = {replica.name: self._loop.create_future() for replica in working}
        for replica in working:
            self.post.send(replica.address, Stop())
        try:
            if working:
                await asyncio.wait(list(self._ended.values()), timeout=STOP_TIME)
            for name in self._ended:
                log.warning("Stage %s did not stop within %.0f s and is killed.", name, STOP_TIME)
        finally:
            self._end()

    def _end(self) -> None:
        for replica in self.replicas:
            self.post.drop(replica.address)  # what is not delivered by now never will be
            replica.address, replica.state = "", "stopped"
        for name, started in self._started.items():
            _fail(started, UnavailableError(f"Replica {name} was stopped while it started."))
        self.post.close()
        if isinstance(self.connector, ShmConnector):
            self.connector.close_all()
        if self._channel is not None:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._server is not None:
            self._server.kill()  # the kernel ends its children with it
            self._server.wait()
        shutil.rmtree(self._directory, ignore_errors=True)  # the forkserver does so only when this process dies


def _short_folder(replicas: list[Replica]) -> str:
    """Where sockets can be: the path of one has at most 107 bytes, 33 of them for what is added here."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + max(len(replica.name) for replica in replicas) <= 74 else "/tmp"


def _fail(future: asyncio.Future[None], error: OmniError) -> None:
    if not future.done():
        future.set_exception(error)
