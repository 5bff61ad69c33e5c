"""Sound at the HTTP edge: float32 samples to the bytes of a file format and back, through PyAV.

A stream is encoded as it comes, and resampled with the state a resampler needs, so that a sound cut into chunks gives the same
samples as the whole. One channel. Nothing here knows a protocol.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import struct
from dataclasses import dataclass, field

import av
import numpy as np
from numpy.typing import NDArray

from vllm_omni.errors import OmniError, RequestError
from vllm_omni.payload import Payload

Samples = NDArray[np.float32]

RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
PCM_RATE = 24_000
"""What raw samples have unless another rate was asked for: they carry no header that could tell."""
MAX_SAMPLES = 1 << 26
"""The longest sound a client may send: 46 minutes at 24 kHz, 256 MiB as float32. A small file can hold far more than its size."""
UNKNOWN_SIZE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Format:
    """A file format. `container` and `codec` are FFmpeg's names; without them the samples are written as they are."""

    media_type: str
    container: str = ""
    codec: str = ""
    sample_format: str = ""
    rates: tuple[int, ...] = RATES
    streaming: dict[str, str] = field(default_factory=dict)


FORMATS = {
    "wav": Format("audio/wav"),
    "pcm": Format("audio/pcm"),
    "mp3": Format("audio/mpeg", "mp3", "libmp3lame", "fltp", streaming={"write_xing": "0"}),
    "flac": Format("audio/flac", "flac", "flac", "s16"),
    "opus": Format("audio/ogg", "ogg", "libopus", "flt", (8_000, 12_000, 16_000, 24_000, 48_000), {"page_duration": "20000"}),
    "aac": Format("audio/aac", "adts", "aac", "fltp"),
}
"""OpenAI's six. Opus comes in Ogg and AAC in ADTS, which can both be streamed."""


class Resampler:
    """A stream of samples at another rate. Its output does not depend on how the stream was cut."""

    def __init__(self, source: int, rate: int) -> None:
        self._source = source
        self._av = av.AudioResampler(format="flt", layout="mono", rate=rate) if source != rate else None

    def push(self, samples: Samples) -> Samples:
        if self._av is None or not len(samples):
            return samples
        return _joined(self._av.resample(_frame(samples, self._source)))

    def flush(self) -> Samples:
        """What the filter still holds. Call it once, at the end."""
        return _joined(self._av.resample(None)) if self._av else np.empty(0, np.float32)


class Encoder:
    """A stream of samples as the bytes of a file; made by `encoder`.

    Either all bytes come from `finish`, with exact sizes in the headers (`whole`), or each `push` gives what is ready and the
    sizes are left open. `samples` counts what went in.
    """

    def __init__(self, format: Format, rate: int | None, whole: bool) -> None:
        self.samples = 0
        self.format = format
        self._rate = rate
        self._whole = whole
        self._source = 0

    def push(self, samples: Samples, source: int) -> bytes:
        """The bytes that are ready after these samples at `source` Hz, which is the same in every call."""
        samples = np.ascontiguousarray(samples, np.float32).reshape(-1)
        if not len(samples):
            return b""
        if not self._source:
            self._source = source
            rate = self._rate or _nearest(source, self.format)
            self._resampler = Resampler(source, rate)
            self._begin(rate)
        if source != self._source:
            raise OmniError(f"The sound changed from {self._source} to {source} samples a second in mid-stream.")
        self.samples += len(samples)
        return self._encode(self._resampler.push(samples))

    def finish(self) -> bytes:
        """The rest of the bytes. Nothing at all if there were no samples."""
        return self._encode(self._resampler.flush()) + self._end() if self._source else b""

    def _begin(self, rate: int) -> None:
        raise NotImplementedError

    def _encode(self, samples: Samples) -> bytes:
        raise NotImplementedError

    def _end(self) -> bytes:
        raise NotImplementedError


def encoder(name: str, rate: int | None = None, *, whole: bool) -> Encoder:
    """An encoder to the format `name`. `rate` is that of the file: by default the sound's own, or the nearest the format has.

    Raises RequestError if the format does not have that rate.
    """
    format = FORMATS[name]
    if rate is not None and rate not in format.rates:
        known = ", ".join(map(str, format.rates))
        raise RequestError(f"'sample_rate' must be one of {known} for {name}, not {rate}.", param="sample_rate")
    if format.codec:
        return _FileEncoder(format, rate, whole)
    return _PcmEncoder(format, rate or PCM_RATE, whole) if name == "pcm" else _WavEncoder(format, rate, whole)


class _PcmEncoder(Encoder):
    def _begin(self, rate: int) -> None:
        self._ready: list[bytes] = []

    def _encode(self, samples: Samples) -> bytes:
        self._ready.append(to_pcm16(samples))
        return b"" if self._whole else self._take()

    def _end(self) -> bytes:
        return self._take()

    def _take(self) -> bytes:
        data, self._ready = b"".join(self._ready), []
        return data


class _WavEncoder(_PcmEncoder):
    def _begin(self, rate: int) -> None:
        self._out = rate
        self._ready = [] if self._whole else [wav_header(rate, None)]

    def _end(self) -> bytes:
        data = self._take()
        return wav_header(self._out, len(data)) + data if self._whole else data


class _FileEncoder(Encoder):
    def _begin(self, rate: int) -> None:
        self._out = rate
        self._file = io.BytesIO() if self._whole else _Sink()
        options = {"flush_packets": "1", "id3v2_version": "0", **({} if self._whole else self.format.streaming)}
        self._container = av.open(self._file, "w", format=self.format.container, container_options=options)
        stream = self._container.add_stream(self.format.codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.codec_context.format = av.AudioFormat(self.format.sample_format)
        stream.codec_context.layout = av.AudioLayout("mono")
        if self.format.codec != "flac":
            stream.codec_context.bit_rate = min(128_000, 4 * rate)
        self._stream = stream

    def _encode(self, samples: Samples) -> bytes:
        if len(samples):
            self._mux(_frame(samples, self._out))
        return self._file.take() if isinstance(self._file, _Sink) else b""

    def _end(self) -> bytes:
        self._mux(None)
        self._container.close()
        return self._file.take() if isinstance(self._file, _Sink) else self._file.getvalue()

    def _mux(self, frame: av.AudioFrame | None) -> None:
        self._container.mux(self._stream.encode(frame))


class _Sink:
    """A file that can only be appended to, for formats that are streamed."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data


async def push(encoder: Encoder, payload: Payload) -> bytes:
    """`encoder.push` for a chunk of a model's sound: codecs work in a thread, raw samples are not worth one."""
    if encoder.format.codec:
        return await asyncio.to_thread(encoder.push, payload.data, payload.meta["rate"])
    return encoder.push(payload.data, payload.meta["rate"])


async def finish(encoder: Encoder) -> bytes:
    """`encoder.finish`, likewise."""
    return await asyncio.to_thread(encoder.finish) if encoder.format.codec else encoder.finish()


def to_pcm16(samples: Samples) -> bytes:
    """Signed 16-bit little-endian; what is louder than full scale is cut."""
    scaled: NDArray[np.float32] = np.rint(np.clip(samples, -1, 1) * 32767)
    return scaled.astype("<i2").tobytes()


def wav_header(rate: int, size: int | None) -> bytes:
    """A RIFF header for 16-bit mono; `size` of the data in bytes, None while it is unknown."""
    riff, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if size is None else (size + 36, size)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16, b"data", data)


def decode(data: bytes, param: str, container: str | None = None) -> tuple[Samples, int]:
    """The samples of an audio file, mixed to one channel, and their rate.

    `container` is FFmpeg's name, None to find out; `param` names the request field in the RequestError that bad data raises.
    """
    chunks: list[Samples] = []
    count = 0
    try:
        with av.open(io.BytesIO(data), "r", format=container, metadata_errors="replace") as file:
            stream = next((stream for stream in file.streams.audio if stream.codec_context), None)
            if stream is None:
                raise RequestError(f"'{param}' holds no sound that can be read.", param=param)
            rate = stream.rate
            mixer = av.AudioResampler(format="flt", layout="mono", rate=rate)
            for frame in itertools.chain(file.decode(stream), (None,)):
                chunks.append(_joined(mixer.resample(frame)))
                count += len(chunks[-1])
                if count > MAX_SAMPLES:
                    raise RequestError(f"'{param}' has more than {MAX_SAMPLES} samples: send a shorter sound.", param=param)
    except RequestError:
        raise
    except (av.FFmpegError, ValueError) as error:  # ValueError: the rate or the channels change on the way
        wanted = f"a sound in the format '{container}'" if container else "a sound"
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"'{param}' cannot be read as {wanted}: {reason}.", param=param) from error
    if not count:
        raise RequestError(f"'{param}' holds no samples.", param=param)
    return np.concatenate(chunks), rate


def _nearest(source: int, format: Format) -> int:
    """The file's rate for a sound at `source` Hz: its own if the format has it, else the next above."""
    if not format.codec:
        return source
    return min((rate for rate in format.rates if rate >= source), default=format.rates[-1])


def _frame(samples: Samples, rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
    frame.sample_rate = rate
    return frame


def _joined(frames: list[av.AudioFrame]) -> Samples:
    parts: list[Samples] = [frame.to_ndarray().reshape(-1).astype(np.float32, copy=False) for frame in frames]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
