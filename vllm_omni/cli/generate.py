"""`vllm-omni generate MODEL PROMPT`: one request in this process. Text streams to stdout; sound and pictures go to files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.cli.model import add_settings, add_source, deploy
from vllm_omni.errors import SettingError
from vllm_omni.payload import AUDIO, IMAGE, PUBLIC_KINDS, TEXT, Kind, Payload, audio, image, text
from vllm_omni.request import Message, Request

if TYPE_CHECKING:
    from vllm_omni.graph import StageGraph

WRITES = {**dict.fromkeys((".wav", ".mp3", ".flac", ".opus", ".aac", ".pcm"), AUDIO), ".png": IMAGE}
READS = {
    **dict.fromkeys((".wav", ".mp3", ".flac", ".opus", ".ogg", ".aac", ".m4a"), AUDIO),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"), IMAGE),
    ".txt": TEXT,
}
"""What a file holds, by the end of its name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("prompt", metavar="PROMPT")
    add_settings(parser)
    out = f"where sound or pictures go, which asks for them: {' '.join(WRITES)}; repeatable"
    parser.add_argument("-o", "--output", metavar="FILE", action="append", default=[], help=out)
    wanted = "an output to ask for beside those of --output (default: text, or all the model gives); repeatable"
    parser.add_argument("--modality", metavar="KIND", action="append", default=[], choices=list(PUBLIC_KINDS), help=wanted)
    parser.add_argument("--param", metavar="NAME=VALUE", action="append", default=[], help="a request parameter; repeatable")
    parser.add_argument("--input", metavar="FILE", action="append", default=[], help="a picture, sound or text to send along; repeatable")


def run(args: argparse.Namespace) -> int:
    files = _outputs(args.output)
    inputs = [_read(Path(name)) for name in args.input]
    deployment = deploy(args)
    wanted = dict.fromkeys([*(PUBLIC_KINDS[name] for name in args.modality), *files])
    params = dict(_params(args.param, deployment.graph))
    request = Request(messages=(Message("user", (text(args.prompt), *inputs)),), outputs=tuple(wanted), params=params)
    for kind in deployment.graph.route(request.outputs, (part.kind for part in request.payloads())).outputs:
        if kind != TEXT and kind not in files:
            ends = " or ".join(f"FILE{end}" for end, written in WRITES.items() if written == kind)
            raise SettingError(f"Say where the {kind} goes with --output {ends}." if ends else f"'{kind}' cannot be written to a file yet.")
    from vllm_omni.omni import Omni

    made: dict[Kind, list[Payload]] = {kind: [] for kind in files}
    last, cut = "\n", False
    with Omni(deployment, inline=True) as omni:
        for payload in omni.stream(request):
            if payload.kind in made:
                made[payload.kind].append(payload)
            else:
                print(payload.data, end="", flush=True)
                last = payload.data or last
                cut = payload.meta.get("finish_reason") == "length"
    if not last.endswith("\n"):
        print()
    if cut:
        _note("the answer was cut off where its tokens ended: --param max_tokens=N allows more")
    _write(made, files)
    return 0


def _write(made: Mapping[Kind, list[Payload]], files: Mapping[Kind, Path]) -> None:
    """The sound to its file, and the pictures to theirs, the second to FILE-2."""
    if sounds := made.get(AUDIO):
        from vllm_omni.serving.audio import Encoder

        encoder = Encoder(files[AUDIO].suffix[1:].lower(), whole=True)
        for sound in sounds:
            encoder.push(sound.data, sound.meta["rate"])
        files[AUDIO].write_bytes(encoder.finish())
        _note(f"wrote {files[AUDIO]}: {encoder.samples / sounds[0].meta['rate']:.1f} s of sound")
    for number, picture in enumerate(made.get(IMAGE, ()), 1):
        from vllm_omni.serving.image import encode_png

        path = files[IMAGE] if number == 1 else files[IMAGE].with_stem(f"{files[IMAGE].stem}-{number}")
        path.write_bytes(encode_png(picture.data))
        _note(f"wrote {path}: {picture.data.shape[1]} x {picture.data.shape[0]} pixels")


def _params(given: Iterable[str], graph: StageGraph) -> Iterator[tuple[str, Any]]:
    """Each NAME=VALUE, checked."""
    from vllm_omni import layers, settle

    for assignment in given:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise SettingError(f"--param {assignment}: write it as NAME=VALUE.", param="param")
        for setting in layers.read_value(["defaults", name], value, "--param"):
            yield name, settle.checked(setting, graph)


def _outputs(names: Iterable[str]) -> dict[Kind, Path]:
    files: dict[Kind, Path] = {}
    for path in map(Path, names):
        kind = _kind_of(path, WRITES, "--output")
        if kind in files:
            raise SettingError(f"--output {path}: {files[kind]} is for {kind} already.", param="output")
        if not path.parent.is_dir():
            raise SettingError(f"--output {path}: there is no folder {path.parent}.", param="output")
        files[kind] = path
    return files


def _read(path: Path) -> Payload:
    """A file as the payload it holds."""
    kind = _kind_of(path, READS, "--input")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingError(f"--input {path}: {error.strerror}.", param="input") from None
    if kind == TEXT:
        return text(data.decode(errors="replace"))
    if kind == IMAGE:
        from vllm_omni.serving.image import decode

        return image(decode(data, str(path)))
    from vllm_omni.serving import audio as sounds

    return audio(*sounds.decode(data, str(path)))


def _kind_of(path: Path, ends: Mapping[str, Kind], flag: str) -> Kind:
    if path.suffix.lower() not in ends:
        raise SettingError(f"{flag} {path}: a name must end in one of {' '.join(ends)}.", param=flag)
    return ends[path.suffix.lower()]


def _note(message: str) -> None:
    print(f"vllm-omni: {message}", file=sys.stderr, flush=True)
