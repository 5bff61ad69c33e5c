"""Video at the HTTP edge: uint8 [frames, height, width, 3] RGB to the bytes of a file and back, through PyAV. The calls block.

A video is encoded as its frames come, into a file that can be read while it grows; `whole` makes of it one with an index at its
beginning. Nothing here knows a protocol.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from numpy.typing import NDArray

from vllm_omni.errors import OmniError, RequestError

Frames = NDArray[np.uint8]

MAX_PIXELS = 1 << 28
"""The longest video a client may send: 291 frames of 1280 x 720, 768 MiB as RGB. A small file can hold far more than its size."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format; `codec` and the options are FFmpeg's. Sides are multiples of `even`."""

    media_type: str
    codec: str
    coding: Mapping[str, str]
    growing: Mapping[str, str]
    whole: Mapping[str, str]
    even: int = 1


FORMATS = {
    "mp4": Format(
        "video/mp4", "libx264", {"crf": "18", "preset": "veryfast", "bf": "0", "rc-lookahead": "10"},
        {"movflags": "empty_moov+default_base_moof", "frag_duration": "250000"}, {"movflags": "faststart"}, even=2,
    ),
    "webm": Format(
        "video/webm", "libvpx-vp9", {"crf": "24", "b": "0", "deadline": "realtime", "cpu-used": "6", "row-mt": "1"},
        {"live": "1", "cluster_time_limit": "250"}, {"cues_to_front": "1"},
    ),
}  # fmt: skip
"""H.264 without frames that look ahead, so that the first is shown at 0, and VP9; in colours of BT.709, at half the resolution."""


class Encoder:
    """Frames as the bytes of a file that grows. `frames` counts what went in; `size` is WIDTHxHEIGHT, "" before the first.

    A side that the format cannot have is made longer by a copy of its last row or column. A sound track would be a second stream
    of the container. Raises OmniError if the size changes on the way.
    """

    def __init__(self, name: str) -> None:
        self.format = FORMATS[name]
        self.frames = 0
        self.size = ""
        self._name = name
        self._file = _Sink()

    def push(self, frames: Frames, fps: float) -> bytes:
        """The bytes that are ready after these frames; `fps` is the same in every call."""
        for frame in frames:
            height, width = frame.shape[:2]
            if not self.frames:
                self.size = f"{width}x{height}"
                self._open(width, height, fps)
            elif self.size != f"{width}x{height}":
                raise OmniError(f"The video changed from {self.size} to {width}x{height} in mid-stream.")
            edges = ((0, -height % self.format.even), (0, -width % self.format.even), (0, 0))
            shown = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.pad(frame, edges, "edge")), format="rgb24")
            shown = shown.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
            shown.pts, shown.time_base = self.frames, 1 / self._rate
            self._container.mux(self._stream.encode(shown))
            self.frames += 1
        return self._file.take()

    def finish(self) -> bytes:
        """The rest of the bytes. Nothing at all if there were no frames."""
        if self.frames:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._file.take()

    def _open(self, width: int, height: int, fps: float) -> None:
        self._rate = Fraction(fps).limit_denominator(1_001)
        options = {**self.format.growing, "flush_packets": "1", "fflags": "+bitexact"}
        self._container = av.open(self._file, "w", format=self._name, container_options=options)
        stream = self._container.add_stream(self.format.codec, rate=self._rate, options=dict(self.format.coding))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width + width % self.format.even, height + height % self.format.even, "yuv420p"
        codec = stream.codec_context
        codec.colorspace, codec.color_range = Colorspace.ITU709, ColorRange.MPEG
        codec.color_primaries, codec.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        self._stream = stream


def whole(data: bytes, name: str) -> bytes:
    """A file that has grown to its end as one that can be searched, with its length and its index before the frames."""
    made = io.BytesIO()
    options = {**FORMATS[name].whole, "fflags": "+bitexact"}
    with (
        av.open(io.BytesIO(data), "r") as source,
        av.open(made, "w", format=name, container_options=options, io_open=lambda *_: _View(made)) as target,
    ):
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is not None:  # the last, empty one has none
                packet.stream = copy
                target.mux(packet)
    return made.getvalue()


class _Sink(io.BytesIO):
    """A file that can only be appended to: what a stream is, to a container."""

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        """What was written since the last time."""
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        return data


class _View(io.RawIOBase):
    """A file that is being written, read at a place of its own: FFmpeg moves the frames so, to put the index before them."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.getbuffer()[self._at : self._at + size].tobytes()
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.getbuffer().nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def decode(data: bytes, param: str) -> tuple[Frames, float]:
    """The frames of a video file, upright, and how many of them are shown in a second.

    `param` names the request field in the RequestError that bad data raises.
    """
    frames: list[Frames] = []
    pixels = 0
    try:
        with av.open(io.BytesIO(data), "r", metadata_errors="replace") as file:
            stream = next((stream for stream in file.streams.video if stream.codec_context), None)
            if stream is None:
                raise RequestError(f"'{param}' holds no video that can be read.", param=param)
            for frame in file.decode(stream):
                pixels += frame.width * frame.height
                if pixels > MAX_PIXELS:
                    said = f"'{param}' has more than {MAX_PIXELS} pixels in all its frames: send a shorter or a smaller video."
                    raise RequestError(said, param=param)
                frames.append(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))
            fps = float(stream.average_rate or stream.guessed_rate or 0)
        if not frames or not fps:
            raise RequestError(f"'{param}' holds no frames.", param=param)
        return np.stack(frames), fps
    except RequestError:
        raise
    except (av.FFmpegError, ValueError) as error:  # ValueError: the size changes on the way
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"'{param}' cannot be read as a video: {reason}.", param=param) from error
