"""Sound at the HTTP edge: float32 samples to the bytes of a file format and back, through PyAV.

A stream is encoded as it comes, and resampled with the state a resampler needs, so that a sound cut into chunks gives the same
samples as the whole. One channel. Nothing here knows a protocol.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass, field

import av
import numpy as np
from numpy.typing import NDArray

from vllm_omni.errors import OmniError, RequestError

Samples = NDArray[np.float32]

RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
PCM_RATE = 24_000
"""What raw samples have unless another rate was asked for: they carry no header that could tell."""
MAX_SAMPLES = 1 << 26
"""The longest sound a client may send: 46 minutes at 24 kHz, 256 MiB as float32. A small file can hold far more than its size."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format; `container`, `codec`, `sample_format` and the `streaming` options are FFmpeg's."""

    media_type: str
    container: str
    codec: str
    sample_format: str
    rates: tuple[int, ...] = RATES
    streaming: dict[str, str] = field(default_factory=dict)


FORMATS = {
    "wav": Format("audio/wav", "wav", "pcm_s16le", "s16"),
    "pcm": Format("audio/pcm", "s16le", "pcm_s16le", "s16"),
    "mp3": Format("audio/mpeg", "mp3", "libmp3lame", "fltp", streaming={"write_xing": "0"}),
    "flac": Format("audio/flac", "flac", "flac", "s16"),
    "opus": Format("audio/ogg", "ogg", "libopus", "flt", (8_000, 12_000, 16_000, 24_000, 48_000), {"page_duration": "20000"}),
    "aac": Format("audio/aac", "adts", "aac", "fltp"),
}
"""OpenAI's six. Opus comes in Ogg and AAC in ADTS, which can both be streamed."""


class Encoder:
    """A stream of samples as the bytes of a file. `samples` counts what went in.

    Either all bytes come from `finish`, with exact sizes in the headers (`whole`), or each `push` gives what is ready and the
    sizes are left open. `rate` is that of the file: by default the sound's own, or the nearest that the format has (raw samples:
    24 kHz). Raises RequestError for a rate the format does not have.
    """

    def __init__(self, name: str, rate: int | None = None, *, whole: bool) -> None:
        self.format = FORMATS[name]
        if rate is not None and rate not in self.format.rates:
            known = ", ".join(map(str, self.format.rates))
            raise RequestError(f"'sample_rate' must be one of {known} for {name}, not {rate}.", param="sample_rate")
        self.samples = 0
        self._name = name
        self._rate = PCM_RATE if name == "pcm" and rate is None else rate
        self._whole = whole
        self._file = io.BytesIO() if whole else _Sink()

    def push(self, samples: Samples, source: int) -> bytes:
        """The bytes that are ready after these samples at `source` Hz, which is the same in every call."""
        samples = np.ascontiguousarray(samples, np.float32).reshape(1, -1)
        if not samples.size:
            return b""
        if not self.samples:
            self._open(source)
        elif source != self._source:
            raise OmniError(f"The sound changed from {self._source} to {source} samples a second in mid-stream.")
        self.samples += samples.size
        frame = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
        frame.sample_rate = source
        self._container.mux(self._stream.encode(frame))
        return b"" if self._whole else self._take()

    def finish(self) -> bytes:
        """The rest of the bytes. Nothing at all if there were no samples."""
        if not self.samples:
            return b""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._take()

    def _take(self) -> bytes:
        data = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return data

    def _open(self, source: int) -> None:
        self._source = source
        rates = self.format.rates if self._name != "wav" else (source,)
        rate = self._rate or min((rate for rate in rates if rate >= source), default=rates[-1])
        streaming = {} if self._whole else self.format.streaming
        options = {"flush_packets": "1", "fflags": "+bitexact", "id3v2_version": "0", **streaming}
        self._container = av.open(self._file, "w", format=self.format.container, container_options=options)
        stream = self._container.add_stream(self.format.codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        codec = stream.codec_context
        codec.format, codec.layout = av.AudioFormat(self.format.sample_format), av.AudioLayout("mono")
        codec.bit_rate = min(128_000, 4 * rate)  # lossless ones have their own
        self._stream = stream


class _Sink(io.BytesIO):
    """A file that can only be appended to: what a stream is, to a container."""

    def seekable(self) -> bool:
        return False


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
            frames = (mixed for frame in itertools.chain(file.decode(stream), (None,)) for mixed in mixer.resample(frame))
            for frame in frames:
                chunks.append(frame.to_ndarray().reshape(-1).astype(np.float32, copy=False))
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
