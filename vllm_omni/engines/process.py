"""The main function of a stage process: one StageHost, its letter box and its connector, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import uvloop

from vllm_omni.connectors.messages import Ready
from vllm_omni.connectors.shm import ShmConnector
from vllm_omni.connectors.sockets import SocketPost
from vllm_omni.engine import StageContext
from vllm_omni.engines.host import StageHost, start
from vllm_omni.engines.load import load_object
from vllm_omni.errors import OmniError


def run_stage(launch: dict[str, Any]) -> None:
    """Run the stage that the orchestrator described; returns when it is told to stop or cannot start."""
    logging.basicConfig(
        level=launch["log_level"], format=f"%(levelname)s %(asctime)s [{launch['replica']}] %(message)s", datefmt="%H:%M:%S"
    )
    uvloop.run(_serve(launch))


async def _serve(launch: dict[str, Any]) -> None:
    context = StageContext(**launch["context"])
    post = SocketPost(f"{launch['address']}.{os.getpid()}")
    connector = ShmConnector(post, torch_here=True)
    error: OmniError | None = None
    try:
        engine = load_object(launch["engine"])(context)
        await start(engine, context.stage)
    except OmniError as failure:  # told to the orchestrator, which decides
        error = failure
    stopped = asyncio.Event()
    if error is None:
        host = StageHost(launch["replica"], context, engine, post, connector)
        host.stopped = stopped.set
    post.send(launch["reply"], Ready(launch["replica"], post.address, error.to_message() if error else None))
    if error is None:
        await stopped.wait()
    await asyncio.sleep(0)  # the last messages leave with the next tick
    post.close()
    connector.close_all()
