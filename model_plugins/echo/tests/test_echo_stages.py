"""What each stage and bridge of echo promises, called directly: no engine, no process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vllm_omni.api import IMAGE, TEXT, Job, OneShotModule, Pause, Payload, RequestError, Stage, StageContext, audio, image, text
from vllm_omni.testing.chunks import CUTS, assert_same, by_kind, in_pieces, replay
from vllm_omni_echo import plugin
from vllm_omni_echo.bridges import lines, melody
from vllm_omni_echo.listener import Listener
from vllm_omni_echo.painter import Painter, colour
from vllm_omni_echo.plugin import COLOUR, LOUDNESS, PITCH
from vllm_omni_echo.singer import Singer
from vllm_omni_echo.speaker import SCALE, Speaker


def loaded(module: OneShotModule, stage: Stage, **args: Any) -> Any:
    module.load(StageContext(stage.name, stage.spec.target, args={arg.name: arg.default for arg in stage.all_args} | args))
    return module


def job(stage: Stage, **params: Any) -> Job:
    return Job("r", {param.name: param.default for param in stage.params if param.default is not None} | params, stage.gives)


def said(*parts: Payload, role: str = "user", turn: int = 0) -> list[Payload]:
    return [Payload(part.kind, part.data, {**part.meta, "role": role, "turn": turn}) for part in parts]


def speech(parts: Sequence[Payload], module: Speaker | None = None, **params: Any) -> list[Payload | Pause]:
    module = module or loaded(Speaker(), plugin.speaker)
    state = module.open(job(plugin.speaker, **params))
    for part in parts:
        (given,) = module.run([(state, part)])
        if isinstance(given, Exception):
            raise given
    return list(module.flush(state))


def spoken(chunks: Sequence[Payload | Pause]) -> str:
    return "".join(chunk.data for chunk in chunks if isinstance(chunk, Payload) and chunk.kind == TEXT)


@pytest.mark.parametrize("prompt", ["hello", "one two", " spaced  out\n\nlines\t", "émigré 🎵 日本語", "\ud800 lone", "a\x00b"])
def test_the_words_come_back_with_their_spacing(prompt: str) -> None:
    assert spoken(speech(said(text(prompt)))) == prompt.strip()


def test_only_the_last_user_message_is_said_and_all_words_are_counted() -> None:
    turns = [
        *said(text("be brief"), role="system", turn=0), *said(text("first"), turn=1), *said(text("ok"), role="assistant", turn=2),
        *said(text("and then"), text("some more"), turn=3),
    ]  # fmt: skip
    chunks = speech(turns)
    assert spoken(chunks) == "and then some more"
    counts = [chunk.meta for chunk in chunks if isinstance(chunk, Payload) and chunk.kind == TEXT]
    assert [meta.get("prompt_tokens") for meta in counts] == [8, None, None, None]
    assert [meta.get("finish_reason") for meta in counts] == [None, None, None, "stop"]
    assert sum(meta["tokens"] for meta in counts) == 4


def test_max_tokens_cuts_and_says_so() -> None:
    chunks = [chunk for chunk in speech(said(text("one two three")), max_tokens=2) if isinstance(chunk, Payload) and chunk.kind == TEXT]
    assert spoken(chunks) == "one two"
    assert chunks[-1].meta["finish_reason"] == "length"
    whole = speech(said(text("one two three")), max_tokens=3)
    assert [chunk.meta["finish_reason"] for chunk in whole if isinstance(chunk, Payload) and "finish_reason" in chunk.meta] == ["stop"]


def test_pictures_and_sounds_are_said_with_their_size() -> None:
    parts = said(text("see"), image(np.zeros((3, 4, 3), np.uint8)), text("hear"), audio(np.zeros(8000, np.float32), 16000))
    assert spoken(speech(parts)) == "see image:4x3 hear audio:0.50s"


@pytest.mark.parametrize("parts", [[], said(text("")), said(text(" \n")), said(text("hi"), role="assistant")])
def test_nothing_to_say_is_refused(parts: list[Payload]) -> None:
    with pytest.raises(RequestError, match="nothing to say") as caught:
        speech(parts)
    assert caught.value.param == "messages"


def test_a_conversation_too_long_is_refused_and_the_limit_named() -> None:
    module = loaded(Speaker(), plugin.speaker, max_chars=10)
    assert spoken(speech(said(text("0123456789")), module)) == "0123456789"
    with pytest.raises(RequestError, match=r"10 characters.*max_chars"):
        speech(said(text("0123456789"), text("x")), module)


def test_a_seed_changes_the_melody_and_nothing_else() -> None:
    def tune(**params: Any) -> list[float]:
        return [float(c.data[0, 0]) for c in speech(said(text("a b c d e f g h")), **params) if isinstance(c, Payload) and c.kind == PITCH]

    assert tune() == tune(seed=0) != tune(seed=1)
    assert tune(seed=-5) == tune(seed=-5)
    assert tune(max_tokens=3) == tune()[:3]
    assert set(tune()) <= set(np.asarray(SCALE, np.float32).tolist())


def test_delay_pauses_before_each_word_and_array_kib_widens_the_rows() -> None:
    chunks = speech(said(text("a b")), delay_ms=20.0, array_kib=3)
    assert [type(chunk) for chunk in chunks] == [Pause, Payload, Payload] * 2
    assert chunks[0] == Pause(0.02)
    rows = [chunk.data for chunk in chunks if isinstance(chunk, Payload) and chunk.kind == PITCH]
    assert [row.nbytes for row in rows] == [3 * 1024] * 2


def test_fail_at_breaks_down_in_mid_stream() -> None:
    module = loaded(Speaker(), plugin.speaker)
    state = module.open(job(plugin.speaker, fail_at=1))
    module.run([(state, *said(text("one two")))])
    words = module.flush(state)
    assert next(words).data == "one"
    with pytest.raises(RuntimeError, match="word 1"):
        list(words)


def test_only_wanted_kinds_are_made() -> None:
    module = loaded(Speaker(), plugin.speaker)
    state = module.open(Job("r", job(plugin.speaker).params, (TEXT,)))
    module.run([(state, *said(text("one two")))])
    assert [chunk.kind for chunk in module.flush(state)] == [TEXT, TEXT]


PITCHES = [Payload(PITCH, np.array([[220.0], [330.0], [277.2]], np.float32)), Payload(PITCH, np.array([[440.0], [220.0]], np.float32))]


def song(chunks: Sequence[Payload], module: Singer | None = None, **params: Any) -> Any:
    module = module or loaded(Singer(), plugin.singer)
    state = module.open(job(plugin.singer, **params))
    return by_kind(sung for chunk in chunks for sung in module.run([(state, chunk)])[0])["audio"]


@pytest.mark.parametrize("voice", plugin.VOICES)
def test_a_melody_in_pieces_is_the_whole_one_sample_for_sample(voice: str) -> None:
    wholes = [song(cut(PITCHES), voice=voice) for cut in CUTS]
    assert wholes[0].shape == (5 * 2880,)
    assert np.abs(wholes[0]).max() == pytest.approx(0.25, rel=0.02)
    for whole in wholes[1:]:
        np.testing.assert_array_equal(whole, wholes[0])


def test_tones_have_their_pitch_and_no_click_between_words() -> None:
    sound = song([Payload(PITCH, np.full((10, 1), 440, np.float32))])
    peak = np.fft.rfft(sound).argmax() * 24_000 / len(sound)
    assert peak == pytest.approx(440, abs=1)
    assert np.abs(np.diff(sound)).max() <= 0.25 * 2 * np.pi * 440 / 24_000 * 1.001


def test_speed_rate_and_tone_ms_set_the_length() -> None:
    assert len(song(PITCHES, speed=2.0)) == 5 * 1440
    module = loaded(Singer(), plugin.singer, rate=8000, tone_ms=50.0)
    assert len(song(PITCHES, module)) == 5 * 400
    state = module.open(job(plugin.singer))
    assert module.run([(state, PITCHES[0])])[0][0].meta == {"rate": 8000}


def test_a_row_of_a_batch_equals_its_solo_run() -> None:
    module = loaded(Singer(), plugin.singer)
    rows = [(module.open(job(plugin.singer, voice=voice)), chunk) for voice, chunk in zip(("saw", "sine"), PITCHES, strict=True)]
    assert rows[0][1].data.shape != rows[1][1].data.shape
    for voice, chunk, given in zip(("saw", "sine"), PITCHES, module.run(rows), strict=True):
        np.testing.assert_array_equal(given[0].data, song([chunk], voice=voice))


def test_a_call_that_raises_leaves_the_other_rows_as_they_were() -> None:
    module = loaded(Singer(), plugin.singer)
    good, bad = module.open(job(plugin.singer)), module.open(job(plugin.singer, fail_singing_at=2))
    with pytest.raises(RuntimeError, match="word 2"):
        module.run([(good, PITCHES[0]), (bad, PITCHES[0])])
    np.testing.assert_array_equal(module.run([(good, PITCHES[0])])[0][0].data, song(PITCHES[:1]))


def test_rows_that_arrive_damaged_are_noticed_and_widths_do_not_share_a_call() -> None:
    module = loaded(Singer(), plugin.singer)
    wide = np.full((2, 256), 220, np.float32)
    np.testing.assert_array_equal(song([Payload(PITCH, wide)]), song([Payload(PITCH, wide[:, :1])]))
    assert module.shape_key(None, Payload(PITCH, wide)) != module.shape_key(None, PITCHES[0])
    wide[1, 200] += 1
    with pytest.raises(ValueError, match="damaged"):
        song([Payload(PITCH, wide)])


def test_the_singer_is_as_loud_as_the_client() -> None:
    sound = song([Payload(LOUDNESS, np.array([0.8], np.float32)), *PITCHES])
    assert np.abs(sound).max() == pytest.approx(0.8, rel=0.02)


def test_the_listener_measures_what_is_wanted() -> None:
    module = loaded(Listener(), plugin.listener)
    picture = np.zeros((2, 2, 3), np.uint8)
    picture[0] = (200, 100, 50)
    parts = said(audio(np.array([0.1, -0.5], np.float32), 16000), image(picture), audio(np.empty(0, np.float32), 16000))
    given = module.run([(job(plugin.listener), part) for part in parts])
    assert_same(by_kind(chunk for row in given for chunk in row), {
        "loudness": np.array([0.5, 0.0], np.float32), "colour": np.array([[100, 50, 25]], np.float32),
    })  # fmt: skip
    assert module.run([(Job("r", {}, (COLOUR,)), part) for part in parts])[0] == []


def bridged(bridge: Any, **inputs: list[Payload]) -> list[Payload]:
    async def collect() -> list[Payload]:
        streams = {key.replace("__", "."): replay(chunks) for key, chunks in inputs.items()}
        return [chunk async for chunk in bridge(streams, job(plugin.painter))]

    return asyncio.run(collect())


def test_lines_break_at_newlines_and_at_the_width_and_keep_each_words_pitch() -> None:
    story = [text(piece) for piece in ("one", " two\n", "three", " " + "long" * 9, " end")]
    hz = Payload(PITCH, np.arange(5, dtype=np.float32)[:, None] + 200)
    for cut in CUTS:
        given = bridged(lines, speaker__text=cut(story), speaker__pitch=in_pieces([hz]))
        assert [(chunk.data, chunk.meta["hz"]) for chunk in given] == [
            ("one two", [200, 201]), ("three", [202]), ("long" * 9 + " end", [203, 204]),
        ]  # fmt: skip


def test_optional_streams_may_be_missing_empty_or_several() -> None:
    hz = [Payload(PITCH, np.array([[220.0]], np.float32))]
    assert [chunk.kind for chunk in bridged(melody, speaker__pitch=hz)] == [PITCH]
    assert [chunk.kind for chunk in bridged(melody, speaker__pitch=hz, listener__loudness=[])] == [PITCH]
    both = [Payload(LOUDNESS, np.array([peak], np.float32)) for peak in (0.2, 0.4)]
    loud, _ = bridged(melody, speaker__pitch=hz, listener__loudness=both)
    assert loud.data == pytest.approx([0.3])
    grounds = [Payload(COLOUR, np.array([[level] * 3], np.float32)) for level in (0, 100)]
    first, _ = bridged(lines, speaker__text=[text("hi")], speaker__pitch=hz, listener__colour=grounds)
    np.testing.assert_array_equal(first.data, [[50, 50, 50]])


def test_the_picture_shows_each_word_in_the_colour_of_its_pitch() -> None:
    module = loaded(Painter(), plugin.painter)
    canvas = module.open(job(plugin.painter))
    ground = Payload(COLOUR, np.array([[10, 20, 30]], np.float32))
    for chunk in (ground, text("MM WW", hz=[220.0, 330.0]), text("second\u2764 🎵", hz=[250.0, 260.0])):
        assert module.run([(canvas, chunk)]) == [()]
    (drawn,) = module.flush(canvas)
    assert (drawn.kind, drawn.data.dtype, drawn.data.shape[0], drawn.data.shape[2]) == (IMAGE, np.uint8, 64, 3)
    assert tuple(drawn.data[0, 0]) == (10, 20, 30)
    first_line = {tuple(pixel) for pixel in drawn.data[8:32].reshape(-1, 3).tolist()}
    assert {colour(220.0), colour(330.0)} <= first_line
    assert colour(250.0) not in first_line


def test_previews_show_more_and_more_of_the_picture() -> None:
    def shown(previews: int) -> list[Any]:
        module = loaded(Painter(), plugin.painter)
        canvas = module.open(job(plugin.painter, partial_images=previews))
        for hz in (220.0, 250.0):
            module.run([(canvas, text("W W W W", hz=[hz] * 4))])
        drawn = list(module.flush(canvas))
        assert [chunk.meta for chunk in drawn] == [*({"partial": index} for index in range(previews)), {}]
        return [chunk.data for chunk in drawn]

    [whole] = shown(0)
    for previews in (1, 3):
        *partial, final = shown(previews)
        assert (final == whole).all()
        ink = [(picture < 255).sum() for picture in (*partial, final)]
        assert ink == sorted(set(ink)) and ink[0] > 0
