"""`vllm-omni demo`: a real server on a free port, one question to it through OpenAI's client, and what each stage did when.

Knows no model: the default one is that of a shipped recipe `*/<device>-demo`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import socket
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.errors import SettingError
from vllm_omni.payload import AUDIO, IMAGE, TEXT

if TYPE_CHECKING:
    from vllm_omni.deployment import Deployment
    from vllm_omni.orchestrator import StageTimes

QUESTION = "Tell me something about the moon."
WIDTH = 48
"""Columns of the timeline's bars."""
RATE = 24_000
"""Samples a second of what OpenAI calls pcm16."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a hub id or an alias (default: that of the demo recipe)")
    parser.add_argument("--ask", metavar="TEXT", default=QUESTION, help="the question")


def run(args: argparse.Namespace) -> int:
    """Writes answer.wav and picture.png into the current directory, as far as the model gives sound and pictures."""
    try:
        import openai  # noqa: F401
    except ModuleNotFoundError:
        raise SettingError("The demo asks through OpenAI's client. Install it with: pip install openai") from None
    from vllm_omni.settle import deploy

    model, recipe = (args.model, None) if args.model else _default()
    return asyncio.run(_demo(deploy(model, recipe=recipe), args.ask))


def _default() -> tuple[str, str]:
    """The first model that can run here of the demo recipes for this machine's device, the CPU, or no device at all; and its recipe."""
    from vllm_omni.discovery import installed, installed_vllm
    from vllm_omni.layers import read_recipe, shipped
    from vllm_omni.machine import detected

    aliases = [alias for found in installed() for alias in found.aliases]
    for device in (detected().device, "cpu", "null"):
        for name in sorted(name for name in shipped() if name.endswith(f"/{device}-demo")):
            settings = {setting.path: setting.value for setting in read_recipe(name)}
            if settings["model",] in aliases and (("vllm",) not in settings or installed_vllm()[1]):
                return str(settings["model",]), name
    raise SettingError("No plugin is installed that a demo recipe is for: name a MODEL.", param="model")


async def _demo(deployment: Deployment, question: str) -> int:
    from vllm_omni.omni import AsyncOmni
    from vllm_omni.serving.app import build, web_server
    from vllm_omni.serving.server import Server

    async with AsyncOmni(deployment) as omni:
        server = Server(omni)
        web = web_server(build(server))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            try:
                await server.warm_up()
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
                print(f"{deployment.served_name} at {url}\n\n> {question}\n")
                answer = await _ask(url, deployment, question)
                print("", *_timeline(deployment, omni.timeline(answer) or {}), sep="\n")
            finally:
                web.should_exit = True
                await serving
    return 0


async def _ask(url: str, deployment: Deployment, question: str) -> str:
    """Print the answer as it comes and write what is no text; returns its id."""
    from openai import AsyncOpenAI

    kinds: Any = [kind.name for kind in (TEXT, AUDIO, IMAGE) if kind in deployment.graph.outputs]
    options: Any = {"audio": {"format": "pcm16"}} if AUDIO in deployment.graph.outputs else {}
    messages: Any = [{"role": "user", "content": question}]
    name, sound, pictures = "", bytearray(), []
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        create = client.chat.completions.create
        async for chunk in await create(model=deployment.served_name, messages=messages, modalities=kinds, stream=True, **options):
            name = chunk.id
            delta: Any = chunk.choices[0].delta.to_dict() if chunk.choices else {}
            audio = delta.get("audio", {})
            print(delta.get("content") or audio.get("transcript", ""), end="", flush=True)
            sound += base64.b64decode(audio.get("data", ""))
            pictures += delta.get("images", [])
    print("\n")
    if sound:
        await asyncio.to_thread(_write_sound, sound)
    if pictures:
        await asyncio.to_thread(Path("picture.png").write_bytes, base64.b64decode(pictures[0]["image_url"]["url"].partition(",")[2]))
        print("wrote picture.png")
    return name


def _write_sound(samples: bytes | bytearray) -> None:
    with wave.open("answer.wav", "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples)
    print(f"wrote answer.wav: {len(samples) / 2 / RATE:.1f} s of sound")


def _timeline(deployment: Deployment, stages: Mapping[str, StageTimes]) -> list[str]:
    """A line for each stage, times in ms since the request came: dots while it waits for its first chunk, a bar until it is done."""
    began = min(stage.queued for stage in stages.values())
    scale = WIDTH / max(max(stage.done for stage in stages.values()) - began, 1e-6)
    name = max(map(len, stages))
    lines = [f"{'stage':{name}}  queued   first    done   (ms)"]
    for stage, times in ((each.name, stages[each.name]) for each in deployment.graph.stages if each.name in stages):
        first = times.first or times.done
        queued, started, done = (round((moment - began) * scale) for moment in (times.queued, first, times.done))
        bar = " " * queued + "·" * (started - queued) + "█" * max(done - started, 1)
        figures = "".join(f"{(moment - began) * 1000:8.1f}" for moment in (times.queued, first, times.done))
        lines.append(f"{stage:{name}}{figures}   {bar}")
    said, heard = (stages.get(getattr(deployment.graph.outputs.get(kind), "name", "")) for kind in (TEXT, AUDIO))
    if said and heard and heard.first:
        lead = said.done - heard.first
        lines.append(f"Sound began {abs(lead):.2f} s {'before' if lead > 0 else 'after'} the end of the text.")
    return lines
