"""Video at the HTTP edge, encoded and decoded again."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from vllm_omni.errors import OmniError, RequestError
from vllm_omni.serving import image, video


def moving(frames: int = 50, height: int = 96, width: int = 160) -> video.Frames:
    """Slow gradients, and a red square that moves."""
    y, x = np.mgrid[0:height, 0:width]
    made = np.stack([np.stack([x + i, y + i, 0 * x + 2 * i], -1) for i in range(frames)]).astype(np.uint8)
    for i in range(frames):
        made[i, 20 : 20 + height // 4, i : i + width // 4] = (255, 0, 0)
    return made


def encoded(name: str, frames: video.Frames, fps: float = 24.0, cut: int = 4) -> list[bytes]:
    encoder = video.Encoder(name)
    pieces = [encoder.push(frames[at : at + cut], fps) for at in range(0, len(frames), cut)]
    assert encoder.frames == len(frames) and encoder.size == f"{frames.shape[2]}x{frames.shape[1]}"
    return [*pieces, encoder.finish()]


def psnr(one: video.Frames, other: video.Frames) -> float:
    return float(10 * np.log10(255**2 / np.square(one.astype(float) - other).mean()))


def shown(data: bytes) -> list[float]:
    """When each frame is shown."""
    with av.open(io.BytesIO(data)) as file:
        return [frame.time for frame in file.decode(video=0)]


@pytest.mark.parametrize("fps", [24.0, 29.97, 7.5])
@pytest.mark.parametrize("name", video.FORMATS)
def test_a_video_comes_back_as_it_was(name: str, fps: float) -> None:
    """The colours, too; whole or as it grew. The first frame is shown at 0, each at its time."""
    frames = moving()
    grown = b"".join(encoded(name, frames, fps))
    for data in (grown, video.whole(grown, name)):
        back, rate = video.decode(data, "file")
        assert back.shape == frames.shape and rate == pytest.approx(fps, rel=1e-3)
        assert psnr(back, frames) > 30
        assert back[25, 30, 35] == pytest.approx(np.array([255, 0, 0]), abs=16)
        assert shown(data) == pytest.approx([number / fps for number in range(50)], abs=0.002)


@pytest.mark.parametrize("name", video.FORMATS)
def test_how_it_is_cut_changes_nothing(name: str) -> None:
    frames = moving()
    assert b"".join(encoded(name, frames, cut=4)) == b"".join(encoded(name, frames, cut=50))


@pytest.mark.parametrize("name", video.FORMATS)
def test_what_is_there_can_be_read_before_the_end(name: str) -> None:
    pieces = encoded(name, moving())
    half = b"".join(pieces[: len(pieces) * 3 // 4])
    back, _ = video.decode(half, "file")
    assert 6 <= len(back) < 50 and psnr(back, moving()[: len(back)]) > 30


def test_a_whole_file_has_its_index_before_the_frames() -> None:
    grown = {name: b"".join(encoded(name, moving())) for name in video.FORMATS}
    made = {name: video.whole(data, name) for name, data in grown.items()}
    assert 0 < made["mp4"].index(b"moov") < made["mp4"].index(b"mdat") and b"moof" not in made["mp4"]
    cues, cluster = b"\x1c\x53\xbb\x6b", b"\x1f\x43\xb6\x75"
    assert 0 < made["webm"].index(cues) < made["webm"].index(cluster)
    for data in made.values():
        with av.open(io.BytesIO(data)) as file:
            assert file.duration == pytest.approx(50 / 24 * 1e6, abs=50_000)


@pytest.mark.parametrize("name", video.FORMATS)
@pytest.mark.parametrize(("height", "width"), [(97, 161), (96, 161), (1, 1), (16, 2)])
def test_odd_sizes_are_not_stretched(name: str, height: int, width: int) -> None:
    """H.264 has even sides here: its last row and column are there twice."""
    frames = moving(8, height, width)
    back, _ = video.decode(video.whole(b"".join(encoded(name, frames)), name), "file")
    even = video.FORMATS[name].even
    assert back.shape == (8, height + height % even, width + width % even, 3)
    assert psnr(back[:, :height, :width], frames) > (30 if height > 90 else 12)


def test_nothing_is_nothing() -> None:
    assert video.Encoder("mp4").finish() == b""
    encoder = video.Encoder("mp4")
    encoder.push(moving(2), 24)
    with pytest.raises(OmniError, match="160x96 to 80x96"):
        encoder.push(moving(2, width=80), 24)


def sound() -> bytes:
    from vllm_omni.serving import audio

    encoder = audio.Encoder("wav", whole=True)
    encoder.push(np.zeros(1_000, np.float32), 8_000)
    return encoder.finish()


@pytest.mark.parametrize("data", [b"", b"no video", b"\x00\x00\x00\x1cftypisom" + bytes(99), sound()])
def test_what_is_no_video_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(RequestError, match="'input_reference'") as refused:
        video.decode(data, "input_reference")
    assert refused.value.param == "input_reference"


def test_a_damaged_video_gives_frames_or_is_refused() -> None:
    data = bytearray(video.whole(b"".join(encoded("mp4", moving())), "mp4"))
    random = np.random.default_rng(0)
    for _ in range(40):
        broken = data.copy()
        for at in random.integers(0, len(data), 30):
            broken[at] = random.integers(256)
        try:
            frames, fps = video.decode(bytes(broken), "file")
        except RequestError as error:
            assert error.param == "file"
        else:
            assert frames.ndim == 4 and fps > 0


def test_a_video_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(encoded("mp4", moving(9)))
    monkeypatch.setattr(video, "MAX_PIXELS", 8 * 96 * 160)
    with pytest.raises(RequestError, match="shorter or a smaller"):
        video.decode(data, "file")


def test_a_video_that_was_filmed_upright() -> None:
    """A quarter turn clockwise, as a phone notes it in the track's matrix."""
    data = video.whole(b"".join(encoded("mp4", moving(3))), "mp4")
    at = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    matrix = b"".join(value.to_bytes(4, "big", signed=True) for value in (0, one, 0, -one, 0, 0, 0, 0, 1 << 30))
    back, _ = video.decode(data[:at] + matrix + data[at + 36 :], "file")
    assert psnr(back, np.rot90(moving(3), -1, axes=(1, 2))) > 30


def test_a_picture_is_told_from_a_video() -> None:
    assert image.readable(image.encode_png(moving(1)[0]))
    assert not image.readable(b"".join(encoded("mp4", moving(2)))) and not image.readable(b"")
