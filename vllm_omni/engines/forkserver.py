"""Starts stage processes by forking one prepared process, and ends them with their parent.

Run by its path, `python forkserver.py FD`: FD is a socket to the parent, on which JSON messages travel. It imports what the stages
share once; a fork then costs milliseconds. It has one thread and opens nothing but that socket. When the parent dies, however,
the socket ends, this process removes the parent's socket directory and ends, and the kernel ends its children (PR_SET_PDEATHSIG).
Unlike `multiprocessing`, it neither imports the caller's main module nor pickles.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(fd: int) -> None:
    """Serve the parent until its end of the socket closes."""
    channel = socket.socket(fileno=fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for a service manager sends them to every process; the parent decides
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    hello = json.loads(channel.recv(1 << 20))
    sys.path[:] = hello["path"]
    for engine in hello["engines"]:
        for name in importlib.import_module(engine.partition(":")[0]).PRELOAD:
            importlib.import_module(name)
    importlib.import_module("vllm_omni.engines.process")
    gc.freeze()  # keeps the collector from copying shared pages in every child
    children: dict[int, str] = {}
    parent = os.pidfd_open(os.getppid())  # a process it forked may hold the other end of the channel
    watched: list[Any] = [channel, wake_read, parent]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap(channel, children)
        if channel in readable or parent in readable:
            try:
                data = channel.recv(1 << 20) if parent not in readable else b""
            except ConnectionError:
                data = b""
            if not data:
                shutil.rmtree(hello["directory"], ignore_errors=True)
                os._exit(0)
            message = json.loads(data)
            pid = _fork(message, channel, (wake_read, wake_write, parent))
            children[pid] = message["replica"]
            _tell(channel, {"started": message["replica"], "pid": pid})


def _reap(channel: socket.socket, children: dict[int, str]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            _tell(channel, {"ended": children.pop(pid), "pid": pid, "reason": reason})


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the parent is gone: reading the channel says so next
        channel.send(json.dumps(message).encode())


def _fork(message: dict[str, Any], channel: socket.socket, files: tuple[int, ...]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_NAME, message["replica"].encode())  # what top and ps -e call it
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        for file in files:
            os.close(file)
        os.environ.update(message["env"])
        from vllm_omni.engines.process import run_stage

        run_stage(message)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
