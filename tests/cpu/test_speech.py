"""`/v1/audio/speech` on a real server."""

from __future__ import annotations

import base64
import json
import socket
import struct
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from conftest import PATIENCE, Running, until

from vllm_omni.serving import audio

SAID = "the quick brown fox"
FORMATS = {
    "wav": (b"RIFF", "audio/wav"), "mp3": (b"\xff", "audio/mpeg"), "flac": (b"fLaC", "audio/flac"), "opus": (b"OggS", "audio/ogg"),
    "aac": (b"\xff\xf1", "audio/aac"), "pcm": (b"", "audio/pcm"),
}  # fmt: skip
SECONDS = 4 * 0.12
"""Four words at the model's usual pace."""


def speak(server: Running, **body: Any) -> httpx.Response:
    return server.http.post("/v1/audio/speech", json={"input": SAID, "voice": "sine"} | body)


def refusal(server: Running, **body: Any) -> tuple[int, str, str | None]:
    response = speak(server, **body)
    error = response.json()["error"]
    return response.status_code, error["message"], error["param"]


def length(name: str, data: bytes, rate: int = audio.PCM_RATE) -> float:
    """Seconds of sound."""
    if name == "pcm":
        return len(data) / 2 / rate
    samples, rate = audio.decode(data, "file")
    return len(samples) / rate


@pytest.mark.parametrize("name", FORMATS)
def test_the_official_client_gets_every_format(server: Running, name: str) -> None:
    """F053, F055: all six, each with its bytes and its type, and of the right length."""
    response = server.openai.audio.speech.create(model="echo", voice="alloy", input=SAID, response_format=name)
    magic, kind = FORMATS[name]
    assert response.response.headers["content-type"] == kind
    assert int(response.response.headers["content-length"]) == len(response.content)
    assert response.content.startswith(magic)
    assert length(name, response.content) == pytest.approx(SECONDS, abs=0.1)


@pytest.mark.parametrize("name", FORMATS)
def test_the_official_client_streams_every_format(server: Running, name: str) -> None:
    """F056: also wav."""
    with server.openai.audio.speech.with_streaming_response.create(
        model="echo", voice="alloy", input=SAID, response_format=name, stream_format="audio", extra_body={"delay_ms": 20}
    ) as response:
        pieces = list(response.iter_bytes())
    assert response.headers["transfer-encoding"] == "chunked" and response.headers["content-type"] == FORMATS[name][1]
    assert len(pieces) > 1
    assert b"".join(pieces).startswith(FORMATS[name][0])
    assert length(name, b"".join(pieces)) == pytest.approx(SECONDS, abs=0.15)


def test_the_default_is_mp3(server: Running) -> None:
    response = speak(server)
    assert response.headers["content-type"] == "audio/mpeg" and response.content[:1] == b"\xff"


def test_wav_headers(server: Running) -> None:
    """F056, F059: open sizes when streamed, exact ones when whole; the same sound."""
    whole = speak(server, response_format="wav").content
    streamed = speak(server, response_format="wav", stream=True).content
    assert struct.unpack("<I", whole[4:8])[0] == len(whole) - 8 and struct.unpack("<I", whole[40:44])[0] == len(whole) - 44
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
    assert whole[44:] == streamed[44:] and len(whole) == 44 + 2 * round(SECONDS * 24_000)


def test_sse(server: Running) -> None:
    response = speak(server, response_format="pcm", stream_format="sse", delay_ms=10)
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"} and len(deltas) > 1
    assert done["type"] == "speech.audio.done" and set(done["usage"]) == {"input_tokens", "output_tokens", "total_tokens"}
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == speak(server, response_format="pcm").content


@pytest.mark.parametrize("rate", [8_000, 44_100])
@pytest.mark.parametrize("name", ["wav", "pcm"])
def test_sample_rate(server: Running, name: str, rate: int) -> None:
    """F065: resampled with state, so equal streamed or not; the pitch stays."""
    asked = {"response_format": name, "sample_rate": rate, "delay_ms": 5, "speed": 0.5}
    whole, streamed = speak(server, **asked).content, speak(server, **asked, stream=True).content
    head = 44 if name == "wav" else 0
    assert whole[head:] == streamed[head:]
    assert length(name, whole, rate) == pytest.approx(2 * SECONDS, abs=1e-3)
    if name == "wav":
        assert audio.decode(whole, "file")[1] == rate


def test_bad_sample_rates(server: Running) -> None:
    """F065: unsupported is a 400 that lists what is."""
    for rate, name in ((12_345, "wav"), (0, "pcm"), (-8_000, "mp3"), (44_100, "opus"), (10**12, "flac")):
        status, message, param = refusal(server, sample_rate=rate, response_format=name)
        assert (status, param) == (400, "sample_rate") and "24000" in message


def test_pcm_of_a_slower_model_is_24_khz(serve: Any) -> None:
    """F061, F062: and of whole samples, in every piece."""
    with serve("echo", "--set", "singer.args.rate=16000") as running:
        running.wait_ready()
        data = speak(running, response_format="pcm").content
        assert len(data) == 2 * round(SECONDS * 24_000)
        assert audio.decode(speak(running, response_format="wav").content, "file")[1] == 16_000
        with running.http.stream(
            "POST", "/v1/audio/speech", json={"input": SAID, "response_format": "pcm", "stream": True, "delay_ms": 10}
        ) as response:
            pieces = list(response.iter_raw())
        assert all(len(piece) % 2 == 0 for piece in pieces) and b"".join(pieces) == data


def test_parameters_have_their_effect(server: Running) -> None:
    assert len(speak(server, response_format="pcm", speed=2).content) == round(SECONDS * 24_000)
    assert speak(server, response_format="pcm", voice={"id": "square"}).content != speak(server, response_format="pcm").content
    assert speak(server, response_format="pcm", instructions="").status_code == 200


def test_what_the_model_lacks_is_refused(server: Running) -> None:
    status, message, param = refusal(server, instructions="cheerfully")
    assert (status, param) == (400, "instructions") and "This model has no parameter 'instructions'." in message


def test_unknown_voice(server: Running) -> None:
    """F052."""
    status, message, param = refusal(server, voice="nobody")
    assert (status, param) == (400, "voice") and "sine" in message and "nobody" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None), ("input", 5), ("voice", 5), ("voice", {"name": "x"}), ("response_format", "ogg"), ("response_format", 1),
        ("speed", "fast"), ("speed", 0), ("stream", "yes"), ("stream_format", "raw"), ("sample_rate", "8k"), ("sample_rate", 8000.5),
        ("model", ["echo"]), ("inptu", "x"),
    ],
)  # fmt: skip
def test_a_wrong_type_or_value_is_named(server: Running, field: str, value: Any) -> None:
    """F044, F055: 400 and never 422; an unknown format lists the known ones."""
    status, message, param = refusal(server, **{field: value})
    assert (status, param) == (400, field) and f"'{field}'" in message
    if value == "ogg":
        assert all(name in message for name in FORMATS)


def test_stream_false_contradicts_a_stream_format(server: Running) -> None:
    assert refusal(server, stream=False, stream_format="sse")[::2] == (400, "stream_format")


def test_too_long_and_too_short(server: Running) -> None:
    """F085, F086."""
    for text in ("x" * 16_385, "x" * 10_000_000, "", " \n"):
        status, _, param = refusal(server, input=text)
        assert (status, param) == (400, "input")
    status, _, param = refusal(server, model="tts-1")
    assert (status, param) == (404, "model")
    for text in ("🦊", "a", ".", "\u0000"):
        response = speak(server, input=text, response_format="pcm")
        assert response.status_code == 200 and len(response.content) > 0


def test_a_stage_that_fails_is_named(server: Running) -> None:
    """F077: 5xx, not 400."""
    for stream in (False, True):
        status, message, _ = refusal(server, fail_singing_at=0, stream=stream)
        assert status == 500 and "singer" in message
    with pytest.raises(openai.InternalServerError, match="singer"):
        server.openai.audio.speech.create(model="echo", voice="alloy", input=SAID, extra_body={"fail_singing_at": 1})


def test_a_cut_stream_does_not_look_whole(server: Running) -> None:
    """Bytes cannot say that they are incomplete, so the connection does."""
    with pytest.raises(httpx.RemoteProtocolError):
        speak(server, response_format="wav", stream=True, fail_at=2, delay_ms=30)
    *deltas, last = speak(server, response_format="wav", stream_format="sse", fail_at=2, delay_ms=30).text.strip().split("\n\n")
    assert deltas and "speaker" in json.loads(last[6:])["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(server: Running, stream: bool) -> None:
    """F106, F107."""
    body = json.dumps({"input": "word " * 300, "delay_ms": 1_000, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    until(lambda: server.in_flight() == 1)
    connection.close()
    until(lambda: not server.held())


def test_tones_have_the_right_pitch(server: Running) -> None:
    """The 8 kHz file sounds like the 24 kHz one."""
    peaks = []
    for rate in (24_000, 8_000):
        data = speak(server, response_format="wav", sample_rate=rate, input="one", speed=0.25).content
        samples, _ = audio.decode(data, "file")
        peaks.append(np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples))
    assert peaks[0] == pytest.approx(peaks[1], abs=3) and peaks[0] > 200
