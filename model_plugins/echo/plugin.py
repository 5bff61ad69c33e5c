"""The declaration: what each stage takes, gives and lets a client set, and what flows between them."""

from __future__ import annotations

from vllm_omni.api import AUDIO, IMAGE, TEXT, Edge, Kind, ModelPlugin, OneShot, Param, Stage, StageGraph

PITCH = Kind("pitch", "float32 [words, width] in Hz; all columns say the same")
LOUDNESS = Kind("loudness", "float32 [sounds], peak in 0..1")
COLOUR = Kind("colour", "float32 [pictures, 3], mean RGB in 0..255")
VOICES = ("sine", "square", "triangle", "saw", "alloy")

speaker = Stage(
    "speaker", OneShot("vllm_omni_echo.speaker:Speaker"), takes=(TEXT, IMAGE, AUDIO), gives=(TEXT, PITCH),
    params=(
        Param("max_tokens", int, minimum=1, help="say at most this many words; a word is a token", small=1),
        Param("seed", int, 0, help="another seed, another melody"),
        Param("delay_ms", float, 0.0, minimum=0, maximum=60_000, help="wait before each word"),
        Param("array_kib", int, 0, minimum=0, maximum=65_536, help="widen each row of the pitch edge to this size"),
        Param("fail_at", int, minimum=0, help="break down before the word of this index"),
    ),
    args=(Param("max_chars", int, 16_384, minimum=1, help="refuse longer conversations"),),
)  # fmt: skip
listener = Stage("listener", OneShot("vllm_omni_echo.listener:Listener"), takes=(IMAGE, AUDIO), gives=(LOUDNESS, COLOUR))
singer = Stage(
    "singer", OneShot("vllm_omni_echo.singer:Singer"), takes=(LOUDNESS, PITCH), gives=(AUDIO,),
    params=(
        Param("voice", str, "sine", choices=VOICES, help="the wave's form; 'alloy', which OpenAI clients send, is a sine"),
        Param("speed", float, 1.0, minimum=0.25, maximum=4, help="words a second, as a multiple of the usual"),
        Param("fail_singing_at", int, minimum=0, help="break down at the word of this index, in a call shared with other requests"),
    ),
    args=(
        Param("tone_ms", float, 120.0, minimum=1, maximum=10_000, help="length of a word at speed 1"),
        Param("rate", int, 24_000, choices=(8_000, 16_000, 24_000, 48_000), help="samples a second"),
    ),
)  # fmt: skip
painter = Stage(
    "painter", OneShot("vllm_omni_echo.painter:Painter"), takes=(COLOUR, TEXT), gives=(IMAGE,),
    params=(Param("partial_images", int, 0, minimum=0, maximum=3, help="previews: the picture with the first words only"),),
)  # fmt: skip

MELODY, LINES = "vllm_omni_echo.bridges:melody", "vllm_omni_echo.bridges:lines"
ECHO = StageGraph(
    "echo",
    edges=(
        Edge(speaker, singer, PITCH, bridge=MELODY),
        Edge(listener, singer, LOUDNESS, bridge=MELODY, optional=True),
        Edge(speaker, painter, TEXT, bridge=LINES),
        Edge(speaker, painter, PITCH, bridge=LINES),
        Edge(listener, painter, COLOUR, bridge=LINES, optional=True),
    ),
    outputs={TEXT: speaker, AUDIO: singer, IMAGE: painter},
)
PLUGIN = ModelPlugin("echo", graphs=(ECHO,), summary="says, sings and draws the last user message; no weights", licence="Apache-2.0")
