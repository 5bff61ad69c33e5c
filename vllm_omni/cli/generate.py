"""`vllm-omni generate MODEL PROMPT`: one request in this process. Text streams to stdout; sound, pictures and videos go to files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.cli.model import add_settings, add_source, deploy
from vllm_omni.errors import SettingError
from vllm_omni.payload import AUDIO, IMAGE, PROGRESS, PUBLIC_KINDS, TEXT, VIDEO, Kind, Payload, audio, image, text, video
from vllm_omni.request import Message, Request

if TYPE_CHECKING:
    from vllm_omni.graph import StageGraph
    from vllm_omni.serving.video import Encoder

VIDEOS = dict.fromkeys((".mp4", ".webm"), VIDEO)
WRITES = {**dict.fromkeys((".wav", ".mp3", ".flac", ".opus", ".aac", ".pcm"), AUDIO), ".png": IMAGE, **VIDEOS}
READS = {
    **dict.fromkeys((".wav", ".mp3", ".flac", ".opus", ".ogg", ".aac", ".m4a"), AUDIO),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"), IMAGE),
    **VIDEOS,
    **dict.fromkeys((".mov", ".mkv"), VIDEO),
    ".txt": TEXT,
}
"""What a file holds, by the end of its name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("prompt", metavar="PROMPT")
    add_settings(parser)
    out = f"where sound, pictures or videos go, which asks for them: {' '.join(WRITES)}; repeatable"
    parser.add_argument("-o", "--output", metavar="FILE", action="append", default=[], help=out)
    wanted = "an output to ask for beside those of --output (default: text, or the first that the model names); repeatable"
    kinds = [name for name, kind in PUBLIC_KINDS.items() if kind != PROGRESS]
    parser.add_argument("--modality", metavar="KIND", action="append", default=[], choices=kinds, help=wanted)
    parser.add_argument("--param", metavar="NAME=VALUE", action="append", default=[], help="a request parameter; repeatable")
    given = "a picture, video, sound or text to send along; repeatable"
    parser.add_argument("--input", metavar="FILE", action="append", default=[], help=given)


def run(args: argparse.Namespace) -> int:
    files = _outputs(args.output)
    inputs = [_read(Path(name)) for name in args.input]
    deployment = deploy(args)
    wanted = dict.fromkeys([*(PUBLIC_KINDS[name] for name in args.modality), *files])
    params = dict(_params(args.param, deployment.graph))
    if PROGRESS in deployment.graph.outputs and wanted.keys() & {IMAGE, VIDEO}:
        wanted[PROGRESS] = None
    request = Request(messages=(Message("user", (text(args.prompt), *inputs)),), outputs=tuple(wanted), params=params)
    for kind in deployment.graph.route(request.outputs, (part.kind for part in request.payloads())).outputs:
        if kind not in (TEXT, PROGRESS) and kind not in files:
            ends = " or ".join(f"FILE{end}" for end, written in WRITES.items() if written == kind)
            raise SettingError(f"Say where the {kind} goes with --output {ends}." if ends else f"'{kind}' cannot be written to a file yet.")
    from vllm_omni.omni import Omni

    made: dict[Kind, list[Payload]] = {kind: [] for kind in files}
    films: dict[int, tuple[Encoder, list[bytes]]] = {}
    last, cut, steps = "\n", False, 0
    with Omni(deployment, inline=True) as omni:
        for payload in omni.stream(request):
            if payload.kind == PROGRESS:
                steps = payload.meta["total"]
                _progress(payload.meta["done"], steps)
            elif payload.kind == VIDEO:
                _film(payload, films, files[VIDEO])
            elif payload.kind in made:
                made[payload.kind].append(payload)
            else:
                print(payload.data, end="", flush=True)
                last = payload.data or last
                cut = payload.meta.get("finish_reason") == "length"
    if steps:
        _progress(steps, steps)
        print(file=sys.stderr) if sys.stderr.isatty() else _note(f"made {steps} steps")
    if not last.endswith("\n"):
        print()
    if cut:
        _note("the answer was cut off where its tokens ended: --param max_tokens=N allows more")
    _write(made, files)
    for number, (encoder, pieces) in enumerate(films.values(), 1):
        from vllm_omni.serving.video import whole

        path = _numbered(files[VIDEO], number)
        path.write_bytes(whole(b"".join([*pieces, encoder.finish()]), path.suffix[1:].lower()))
        _note(f"wrote {path}: {encoder.frames} frames of {encoder.size.replace('x', ' x ')} pixels")
    return 0


def _progress(done: int, total: int) -> None:
    """A bar that grows, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{'█' * (30 * done // total):░<30} {done} of {total} steps", end="", file=sys.stderr, flush=True)


def _film(frames: Payload, films: dict[int, tuple[Encoder, list[bytes]]], path: Path) -> None:
    """Encode frames as they come, each sample's into a film of its own."""
    from vllm_omni.serving.video import Encoder

    index = frames.meta.get("index", 0)
    if index not in films:
        films[index] = (Encoder(path.suffix[1:].lower()), [])
    encoder, pieces = films[index]
    pieces.append(encoder.push(frames.data, frames.meta["fps"]))


def _numbered(path: Path, number: int) -> Path:
    """FILE, and FILE-2 for the second of its kind."""
    return path if number == 1 else path.with_stem(f"{path.stem}-{number}")


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

        path = _numbered(files[IMAGE], number)
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
    if kind == VIDEO:
        from vllm_omni.serving import video as films

        return video(*films.decode(data, str(path)))
    from vllm_omni.serving import audio as sounds

    return audio(*sounds.decode(data, str(path)))


def _kind_of(path: Path, ends: Mapping[str, Kind], flag: str) -> Kind:
    if path.suffix.lower() not in ends:
        raise SettingError(f"{flag} {path}: a name must end in one of {' '.join(ends)}.", param=flag)
    return ends[path.suffix.lower()]


def _note(message: str) -> None:
    print(f"vllm-omni: {message}", file=sys.stderr, flush=True)
