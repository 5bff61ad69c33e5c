"""Sound and pictures at the HTTP edge, encoded and decoded again."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from vllm_omni.errors import OmniError, RequestError
from vllm_omni.serving import audio, image

MAGIC = {"wav": b"RIFF", "mp3": b"\xff", "flac": b"fLaC", "opus": b"OggS", "aac": b"\xff\xf1"}
SECONDS = 1.5
EMPTY_WAV = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36, b"WAVE", b"fmt ", 16, 1, 1, 24_000, 48_000, 2, 16, b"data", 0)


def tone(rate: int, hz: float = 440, seconds: float = SECONDS) -> audio.Samples:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def encoded(name: str, samples: audio.Samples, source: int, rate: int | None = None, *, whole: bool, cut: int = 1_000) -> bytes:
    encoder = audio.Encoder(name, rate, whole=whole)
    pieces = [encoder.push(samples[at : at + cut], source) for at in range(0, len(samples), cut)]
    if whole:
        assert not any(pieces)
    return b"".join([*pieces, encoder.finish()])


def pitch(samples: audio.Samples, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * rate / len(samples))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize("source", [8_000, 22_050, 24_000, 48_000])
@pytest.mark.parametrize("name", MAGIC)
def test_a_tone_comes_back_from_every_format(name: str, source: int, whole: bool) -> None:
    """F053: the magic bytes are those of the format. Length within a codec's frames, the same pitch, the right rate."""
    data = encoded(name, tone(source), source, whole=whole)
    assert data.startswith(MAGIC[name])
    samples, rate = audio.decode(data, "file")
    assert rate == (48_000 if name == "opus" else source)  # Opus is always decoded to 48 kHz
    frames = {"aac": 2 * 1024, "mp3": 0 if whole else 3 * 1152}.get(name, 0)
    assert 0 <= len(samples) - round(SECONDS * rate) <= frames
    assert pitch(samples, rate) == pytest.approx(440, abs=2)
    assert np.abs(samples[rate // 4 : rate]).max() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("name", audio.FORMATS)
def test_a_streamed_file_begins_before_the_sound_ends(name: str) -> None:
    encoder = audio.Encoder(name, whole=False)
    assert encoder.push(np.empty(0, np.float32), 24_000) == b""
    assert any(encoder.push(tone(24_000, seconds=0.1), 24_000) for _ in range(3))


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000])
def test_resampling_does_not_depend_on_the_cuts(rate: int) -> None:
    """F065: equal streamed or not, and of exactly the right length."""
    whole = encoded("pcm", tone(24_000), 24_000, rate, whole=True, cut=10**6)
    for cut in (1, 137, 2_400) if rate == 8_000 else (137,):
        assert encoded("pcm", tone(24_000), 24_000, rate, whole=False, cut=cut) == whole
    assert len(whole) == 2 * round(SECONDS * rate)
    assert pitch(np.frombuffer(whole, "<i2").astype(np.float32), rate) == pytest.approx(440, abs=2)


def test_an_unsupported_rate_is_refused_by_name() -> None:
    """F065: with the rates that exist."""
    with pytest.raises(RequestError, match=r"'sample_rate' must be one of 8000, .*48000 for mp3, not 12345") as refused:
        audio.Encoder("mp3", 12_345, whole=True)
    assert refused.value.param == "sample_rate"
    with pytest.raises(RequestError, match="opus"):
        audio.Encoder("opus", 44_100, whole=True)


def test_a_rate_that_the_format_lacks_becomes_the_next_above() -> None:
    assert audio.decode(encoded("mp3", tone(20_000), 20_000, whole=True), "file")[1] == 22_050
    assert audio.decode(encoded("aac", tone(96_000), 96_000, whole=True), "file")[1] == 48_000


@pytest.mark.parametrize("cut", [1, 333])
def test_pcm_is_24_khz_and_of_whole_samples(cut: int) -> None:
    """F061, F062: each piece has whole samples, whatever the model's rate and chunks."""
    encoder = audio.Encoder("pcm", whole=False)
    samples = tone(16_000, seconds=0.1)
    pieces = [encoder.push(samples[at : at + cut], 16_000) for at in range(0, len(samples), cut)]
    pieces.append(encoder.finish())
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert len(b"".join(pieces)) == 2 * 2_400


def test_wav_headers() -> None:
    """F056, F059: open sizes while streaming, in the first piece only; exact ones when the length is known."""
    encoder = audio.Encoder("wav", whole=False)
    first, second = encoder.push(tone(24_000), 24_000), encoder.push(tone(24_000), 24_000)
    assert struct.unpack("<4sI4s", first[:12]) == (b"RIFF", 0xFFFFFFFF, b"WAVE")
    assert struct.unpack("<4sI", first[36:44]) == (b"data", 0xFFFFFFFF)
    assert b"RIFF" not in second and len(second) == 2 * 36_000
    whole = encoded("wav", tone(24_000), 24_000, whole=True)
    assert struct.unpack("<I", whole[4:8])[0] == len(whole) - 8
    assert struct.unpack("<I", whole[40:44])[0] == len(whole) - 44 == 2 * 36_000
    assert struct.unpack("<HHIIHH", whole[20:36]) == (1, 1, 24_000, 48_000, 2, 16)


def test_what_is_too_loud_is_cut_not_wrapped() -> None:
    data = encoded("pcm", np.array([2, -2, 1, -1, 0], np.float32), 24_000, whole=True)
    assert np.frombuffer(data, "<i2").tolist() == [32767, -32768, 32767, -32768, 0]


def test_no_samples_make_no_file_and_a_changed_rate_is_an_error() -> None:
    for name in audio.FORMATS:
        assert audio.Encoder(name, whole=True).finish() == b""
    encoder = audio.Encoder("wav", whole=True)
    encoder.push(tone(24_000), 24_000)
    with pytest.raises(OmniError, match="from 24000 to 16000"):
        encoder.push(tone(16_000), 16_000)


def test_stereo_is_mixed() -> None:
    mono = encoded("wav", np.stack([tone(24_000), -tone(24_000)], axis=1), 24_000, whole=True)  # left and right in turn
    stereo = mono[:22] + struct.pack("<HIIH", 2, 24_000, 96_000, 4) + mono[34:]
    samples, rate = audio.decode(stereo, "file")
    assert (len(samples), rate) == (36_000, 24_000)
    assert np.abs(samples).max() < 0.01


def test_tags_in_no_known_encoding_do_no_harm() -> None:
    plain = encoded("wav", tone(24_000), 24_000, whole=True)
    title = b"INFOINAM" + struct.pack("<I", 4) + b"\xe9t\xe9\0"
    tagged = plain[:36] + b"LIST" + struct.pack("<I", len(title)) + title + plain[36:]
    assert np.array_equal(audio.decode(tagged, "file")[0], audio.decode(plain, "file")[0])


@pytest.mark.parametrize("data", [b"", b"RIFF", b"not a sound at all", image.encode_png(np.zeros((4, 4, 3), np.uint8)), EMPTY_WAV])
def test_bad_sound_names_the_field(data: bytes) -> None:
    """F043: the client's fault is a 400."""
    with pytest.raises(RequestError, match=r"'messages\[0\]'") as refused:
        audio.decode(data, "messages[0]")
    assert (refused.value.param, refused.value.status) == ("messages[0]", 400)


def test_the_wrong_container_is_refused() -> None:
    with pytest.raises(RequestError, match="in the format 'mp3'"):
        audio.decode(encoded("wav", tone(24_000), 24_000, whole=True), "file", "mp3")


def test_sound_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_SAMPLES", 10_000)
    with pytest.raises(RequestError, match="more than 10000 samples"):
        audio.decode(encoded("flac", tone(24_000), 24_000, whole=True), "file")


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_refused_or_read_but_nothing_else(seed: int) -> None:
    """No error but RequestError comes out, whatever comes in."""
    rng = np.random.default_rng(seed)
    for name in MAGIC:
        damaged = bytearray(encoded(name, tone(24_000, seconds=0.2), 24_000, whole=True))
        for at in rng.integers(min(len(damaged), 300), size=6):
            damaged[at] = rng.integers(256)
        try:
            audio.decode(bytes(damaged), "file")
        except RequestError as error:
            assert error.param == "file"


def test_a_picture_comes_back() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    png = image.encode_png(pixels)
    assert png.startswith(b"\x89PNG")
    assert np.array_equal(image.decode(png, "file"), pixels)


def test_transparent_is_white_and_upside_down_is_turned() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (2, 1), (255, 0, 0, 0)).save(file, "PNG")
    assert image.decode(file.getvalue(), "file").tolist() == [[[255, 255, 255]] * 2]
    file, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.new("L", (8, 4), 77).save(file, "JPEG", exif=turned)
    assert image.decode(file.getvalue(), "file").shape == (8, 4, 3)


@pytest.mark.parametrize("data", [b"", b"no picture", EMPTY_WAV, image.encode_png(np.zeros((9, 9, 3), np.uint8))[:45]])
def test_bad_pictures_name_the_field(data: bytes) -> None:
    with pytest.raises(RequestError, match="'picture'") as refused:
        image.decode(data, "picture")
    assert refused.value.param == "picture"


def test_a_decompression_bomb_is_refused_unread() -> None:
    """A few bytes that claim 9000 x 9000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", b"")
        + chunk(b"IEND", b"")
    )
    with pytest.raises(RequestError, match="9000 x 9000 pixels"):
        image.decode(bomb, "file")
