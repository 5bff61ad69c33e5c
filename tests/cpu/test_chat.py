"""`/v1/chat/completions` on a real server: the official client, a hand-made one, and one that goes away."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import struct
from typing import Any

import numpy as np
import openai
import pytest
from conftest import Running, until
from PIL import Image

from vllm_omni.errors import RequestError
from vllm_omni.graph import OneShot, Stage, StageGraph
from vllm_omni.payload import TEXT, VIDEO
from vllm_omni.serving import audio, chat, image

SAID = "the quick brown fox"
MAGIC = {"wav": b"RIFF", "mp3": b"\xff", "flac": b"fLaC", "opus": b"OggS", "aac": b"\xff\xf1"}


def user(content: Any = SAID) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def post(server: Running, **body: Any) -> tuple[int, dict[str, Any]]:
    response = server.http.post("/v1/chat/completions", json=body)
    return response.status_code, response.json()


def refusal(server: Running, **body: Any) -> tuple[int, str, str | None]:
    """Status, message and field of a request that must fail in OpenAI's shape."""
    status, answer = post(server, **({"messages": user()} | body))
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
    return status, answer["error"]["message"], answer["error"]["param"]


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def wav(seconds: float = 0.5, rate: int = 16_000) -> bytes:
    encoder = audio.Encoder("wav", whole=True)
    encoder.push((0.5 * np.sin(np.arange(round(rate * seconds)) / 9)).astype(np.float32), rate)
    return encoder.finish()


# What the official client gets.


def test_text(server: Running) -> None:
    answer = server.openai.chat.completions.create(model="echo", messages=user())
    assert answer.object == "chat.completion" and answer.model == "echo" and answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == SAID and choice.message.audio is None
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8,
    }  # fmt: skip


def test_text_streamed(server: Running) -> None:
    """F088, F089: one choice, the role in the first delta, one finish_reason on the last chunk; tokens as produced."""
    stream = server.openai.chat.completions.create(model="echo", messages=user(), stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert last.choices == [] and last.usage.completion_tokens == 4 and last.usage.total_tokens == 8
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_the_wire_format_of_a_stream(server: Running) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": user("one"), "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    assert set(chunks[0]) == {"id", "object", "created", "model", "choices"}
    assert set(chunks[0]["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}


@pytest.mark.parametrize("stream", [False, True])
def test_length(server: Running, stream: bool) -> None:
    """F089: a cut answer says so, and counts what was produced. OpenAI's newer name means the same."""
    for name in ("max_tokens", "max_completion_tokens"):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer = server.openai.chat.completions.create(model="echo", messages=user(), stream=stream, **{name: 2}, **options)
        if stream:
            *_, end, last = list(answer)
            assert (end.choices[0].finish_reason, last.usage.completion_tokens) == ("length", 2)
        else:
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)
            assert answer.choices[0].message.content == "the quick"


@pytest.mark.parametrize("name", [*MAGIC, "pcm16"])
def test_audio(server: Running, name: str) -> None:
    """F053: encoded as asked. The text is the transcript."""
    answer = server.openai.chat.completions.create(
        model="echo", messages=user(), modalities=["text", "audio"], audio={"voice": "alloy", "format": name}
    )
    message = answer.choices[0].message
    assert message.content is None and message.audio.transcript == SAID
    assert message.audio.id and message.audio.expires_at
    data = base64.b64decode(message.audio.data)
    assert data.startswith(MAGIC.get(name, b""))
    samples = audio.decode(data, "file")[0] if name != "pcm16" else np.frombuffer(data, "<i2") / 32768
    assert np.abs(samples).max() > 0.1


def test_whole_wav_has_exact_sizes(server: Running) -> None:
    """F059."""
    _, answer = post(server, messages=user(), modalities=["audio"])
    data = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])
    assert struct.unpack("<I", data[40:44])[0] == len(data) - 44 > 0


@pytest.mark.parametrize("name", [*MAGIC, "pcm16"])
def test_audio_streamed(server: Running, name: str) -> None:
    """F058, F088: one header, in the first non-empty piece; the expiry after the sound; one finish_reason, on the last chunk."""
    stream = server.openai.chat.completions.create(
        model="echo", messages=user(), modalities=["text", "audio"], audio={"voice": "square", "format": name}, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    sounds = [choice.delta.audio for choice in choices if choice.delta.audio]
    assert sounds[0].id and "".join(sound.transcript or "" for sound in sounds) == SAID
    assert [bool(sound.expires_at) for sound in sounds] == [False] * (len(sounds) - 1) + [True]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any(choice.delta.content for choice in choices)
    pieces = [base64.b64decode(sound.data) for sound in sounds if sound.data]
    assert len(pieces) > 1 and all(pieces)
    if name == "wav":
        assert pieces[0][:8] == b"RIFF\xff\xff\xff\xff" and not any(b"RIFF" in piece for piece in pieces[1:])
    if name == "pcm16":
        assert all(len(piece) % 2 == 0 for piece in pieces)
    else:
        assert b"".join(pieces).startswith(MAGIC[name])
        assert len(audio.decode(b"".join(pieces), "file")[0]) > 0


@pytest.mark.parametrize("name", ["wav", "pcm16"])
def test_audio_is_the_same_streamed_or_not(server: Running, name: str) -> None:
    asked = {"messages": user(), "modalities": ["audio"], "audio": {"format": name}, "seed": 5}
    whole = base64.b64decode(post(server, **asked)[1]["choices"][0]["message"]["audio"]["data"])
    lines = server.http.post("/v1/chat/completions", json=asked | {"stream": True}).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    streamed = b"".join(base64.b64decode(delta.get("audio", {}).get("data", "")) for delta in deltas)
    head = 44 if name == "wav" else 0
    assert streamed[head:] == whole[head:] and len(whole) > 10_000


@pytest.mark.parametrize("stream", [False, True])
def test_pictures(server: Running, stream: bool) -> None:
    asked = {"messages": user(), "modalities": ["text", "image"], "stream": stream}
    if stream:
        lines = server.http.post("/v1/chat/completions", json=asked).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        content = "".join(delta.get("content") or "" for delta in deltas)
        pictures = [picture for delta in deltas for picture in delta.get("images", [])]
    else:
        message = post(server, **asked)[1]["choices"][0]["message"]
        content, pictures = message["content"], message["images"]
    assert content == SAID
    [picture] = pictures
    head, _, data = picture["image_url"]["url"].partition(",")
    assert (picture["type"], head) == ("image_url", "data:image/png;base64")
    assert np.ptp(image.decode(base64.b64decode(data), "picture")) > 0


def test_sent_pictures_and_sounds_arrive(server: Running) -> None:
    png = image.encode_png(np.zeros((20, 30, 3), np.uint8))
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": data_uri("image/png", png), "detail": "auto"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": data_uri("audio/wav", wav(0.25))}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(bytes(48_000)).decode(), "format": "pcm16"}},
    ]
    answer = server.openai.chat.completions.create(model="echo", messages=user(content))
    assert answer.choices[0].message.content.split() == ["look", "image:30x20", "audio:0.50s", "audio:0.25s", "audio:1.00s"]


def test_a_conversation_goes_on_with_the_answer_as_it_came(server: Running) -> None:
    first = server.openai.chat.completions.create(model="echo", messages=user()).choices[0].message
    messages = [{"role": "developer", "content": "be kind"}, *user(), first, *user("and again")]
    assert server.openai.chat.completions.create(model="echo", messages=messages).choices[0].message.content == "and again"


def test_equal_calls_at_once_are_all_answered(server: Running) -> None:
    """F110: ids are unique; each gets its own answer."""

    async def all_at_once() -> list[tuple[str, str]]:
        async with server.async_openai() as client:

            async def one(number: int) -> tuple[str, str]:
                messages = user(SAID if number % 2 else f"number {number}")
                if number % 3:
                    answer = await client.chat.completions.create(model="echo", messages=messages)
                    return answer.id, answer.choices[0].message.content
                stream = await client.chat.completions.create(model="echo", messages=messages, stream=True)
                chunks = [chunk async for chunk in stream]
                return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

            return await asyncio.gather(*map(one, range(24)))

    answers = asyncio.run(all_at_once())
    assert [content for _, content in answers] == [SAID if number % 2 else f"number {number}" for number in range(24)]
    assert len({id for id, _ in answers}) == 24


# What is refused, and how it is said.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hello"), ("messages", None), ("messages", [1]), ("stream", "yes"), ("model", 7), ("modalities", "audio"),
        ("audio", "wav"), ("max_tokens", "many"), ("max_tokens", 1.5), ("max_tokens", 0), ("max_tokens", True), ("seed", [1]),
        ("speed", 99), ("delay_ms", -1), ("user", 1), ("metadata", "x"), ("n", "1"), ("n", True), ("max_completion_tokens", {}),
    ],
)  # fmt: skip
def test_a_wrong_type_or_value_is_named(server: Running, field: str, value: Any) -> None:
    """F044."""
    status, message, param = refusal(server, **{field: value})
    assert status == 400 and f"'{field}" in message and (param or "").startswith(field)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].contnet", {"messages": [{"role": "user", "contnet": "x"}]}),
        ("messages[0].content[0].type", {"messages": user([{"type": "image"}])}),
        ("messages[0].content[0].type", {"messages": user([{"type": ["text"]}])}),
        ("messages[0].content[0].type", {"messages": user(["text"])}),
        ("messages[0].content[0].text", {"messages": user([{"type": "text", "text": 1}])}),
        ("messages[0].content[0].image_url.ulr", {"messages": user([{"type": "image_url", "image_url": {"ulr": "x"}}])}),
        ("messages[0].content[0].image_url.detail", {"messages": user([{"type": "image_url", "image_url": {"url": "", "detail": "low"}}])}),
        ("audio.format", {"modalities": ["audio"], "audio": {"format": "ogg"}}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ],
)  # fmt: skip
def test_a_fault_inside_is_named_by_its_path(server: Running, path: str, body: dict[str, Any]) -> None:
    """F044."""
    status, message, param = refusal(server, **body)
    assert (status, param) == (400, path), message
    assert path.split(".")[0] in message


def test_unknown_fields_get_the_nearest_known_name(server: Running) -> None:
    for wrong, right in {
        "temprature": "temperature",
        "voise": "voice",
        "max_token": "max_tokens",
        "stream_option": "stream_options",
    }.items():
        status, message, param = refusal(server, **{wrong: 1})
        assert (status, param) == (400, wrong)
        assert message == f"Unknown field '{wrong}'. Did you mean '{right}'?"


def test_parameters_the_model_lacks_are_refused(server: Running) -> None:
    for name in ("temperature", "top_p", "frequency_penalty"):
        status, message, param = refusal(server, **{name: 0.5})
        assert (status, param) == (400, name) and f"This model has no parameter '{name}'." in message
    status, message, param = refusal(server, stop=["x"])
    assert (status, param) == (400, "stop") and "This model has no parameter 'stop'." in message


def test_what_would_have_an_effect_is_refused_but_not_its_neutral_value(server: Running) -> None:
    wanted = {
        "n": 2, "logprobs": True, "tools": [{"type": "function"}], "response_format": {"type": "json_object"},
        "tool_choice": "required", "logit_bias": {"5": 1}, "reasoning_effort": "high", "prediction": {}, "functions": [{}],
    }  # fmt: skip
    for name, value in wanted.items():
        status, message, param = refusal(server, **{name: value})
        assert (status, param) == (400, name) and message.startswith(f"'{name}' is not supported here")
    neutral = {
        "n": 1, "logprobs": False, "tools": [], "tool_choice": "auto", "stop": None, "response_format": {"type": "text"}, "logit_bias": {},
        "frequency_penalty": 0, "presence_penalty": 0.0, "temperature": None, "audio": None, "modalities": None, "stream_options": None,
    }  # fmt: skip
    silent = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
    }
    status, answer = post(server, messages=user(), **neutral, **silent)
    assert status == 200 and answer["choices"][0]["message"]["content"] == SAID


def test_declared_parameters_have_their_effect(server: Running) -> None:
    """As fields of the body, which is how the client sends `extra_body`."""

    def sung(**extra: Any) -> bytes:
        answer = server.openai.chat.completions.create(model="echo", messages=user(), modalities=["audio"], extra_body=extra)
        return base64.b64decode(answer.choices[0].message.audio.data)

    assert len(sung(speed=2.0)) < 0.6 * len(sung(speed=1.0))
    assert sung(voice="square") != sung(voice="sine") == sung(audio={"voice": "alloy", "format": "wav"})
    assert sung(seed=1) != sung(seed=2)
    assert sung(audio={"voice": {"id": "square"}, "format": "wav"}) == sung(voice="square")


def test_an_unknown_voice_is_refused_with_the_known_ones(server: Running) -> None:
    """F052."""
    status, message, param = refusal(server, modalities=["audio"], audio={"voice": "nobody", "format": "wav"})
    assert (status, param) == (400, "audio.voice") and "sine" in message and "alloy" in message
    assert refusal(server, voice="sine", modalities=["audio"], audio={"voice": "sine"})[0] == 400


def test_modalities_are_checked(server: Running) -> None:
    for asked in (["vidoe"], ["video"], []):
        status, _, param = refusal(server, modalities=asked)
        assert (status, param) == (400, "modalities")
    assert "Did you mean 'audio'?" in refusal(server, modalities=["audoi"])[1]
    assert refusal(server, audio={"format": "wav"})[2] == "audio"
    assert refusal(server, stream_options={"include_usage": True})[2] == "stream_options"


def test_a_model_that_gives_nothing_a_chat_can_hold_is_no_success() -> None:
    film = Stage("film", OneShot("no.such:Film"), takes=(TEXT,), gives=(VIDEO,))
    with pytest.raises(RequestError, match="in a chat: nothing"):
        chat._outputs(StageGraph("film", stages=(film,), outputs={VIDEO: film}), None)


def test_an_unknown_model_is_404_and_names_the_served_one(server: Running) -> None:
    """F085: nothing is downloaded."""
    for name in ("gpt-4o", "../../etc/passwd", "owner/name", ""):
        status, message, param = refusal(server, model=name)
        assert (status, param) == (404, "model") and "'echo'" in message
    with pytest.raises(openai.NotFoundError) as refused:
        server.openai.chat.completions.create(model="gpt-4o", messages=user())
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("content", ["", " \n\t ", [], [{"type": "text", "text": " "}]])
def test_nothing_said_is_refused(server: Running, content: Any) -> None:
    """F086."""
    status, _, param = refusal(server, messages=user(content))
    assert (status, param) == (400, "messages[0].content")


def test_no_messages_are_refused(server: Running) -> None:
    assert refusal(server, messages=[])[::2] == (400, "messages")


@pytest.mark.parametrize("content", ["🦊", "a", ".", "\u0000", "é" * 3, "<|im_end|>"])
@pytest.mark.parametrize("modality", ["text", "audio", "image"])
def test_edge_inputs_are_answered(server: Running, content: str, modality: str) -> None:
    """F049, F086: one character, only emoji, degenerate input: an answer, and the engine lives."""
    status, answer = post(server, messages=user(content), modalities=[modality])
    assert status == 200, answer


def test_too_much_is_the_clients_fault(server: Running) -> None:
    """F043, F085: what the model cannot take is a 400, not a 500."""
    for stream in (False, True):
        status, message, _ = refusal(server, messages=user("word " * 10_000), stream=stream)
        assert status == 400 and "longer than" in message
    assert refusal(server, messages=user("x" * 10_000_000))[0] == 400


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9/x.png", "data:"), ("file:///etc/passwd", "data:"), ("data:image/png;base64,", "picture"),
        ("data:image/png,AAAA", "base64"), ("data:text/plain;base64,AAAA", "data:image/"), ("data:image/png;base64,@@", "base64"),
        ("data:image/png;base64,AAAA", "picture"), ("", "data:"),
    ],
)  # fmt: skip
def test_pictures_come_as_data_only(server: Running, url: str, says: str) -> None:
    """Nothing is fetched; bad data is a 400 that names the field."""
    status, message, param = refusal(server, messages=user([{"type": "image_url", "image_url": {"url": url}}]))
    assert (status, param) == (400, "messages[0].content[0].image_url.url") and says in message


def test_bad_sound_names_the_field(server: Running) -> None:
    for data, name in (("AAAA", "wav"), ("", "mp3"), (base64.b64encode(wav()).decode(), "mp3"), ("AAAA", "pcm16"), ("*", "wav")):
        part = {"type": "input_audio", "input_audio": {"data": data, "format": name}}
        status, message, param = refusal(server, messages=user([part]))
        assert (status, param) == (400, "messages[0].content[0].input_audio.data"), message


def test_a_huge_picture_in_a_small_file_is_refused(server: Running) -> None:
    file = io.BytesIO()
    Image.new("L", (9_000, 9_000)).save(file, "PNG")
    url = data_uri("image/png", file.getvalue())
    status, message, _ = refusal(server, messages=user([{"type": "image_url", "image_url": {"url": url}}]))
    assert status == 400 and "9000 x 9000" in message


# What happens when something breaks.


def test_a_failure_before_the_first_piece_is_a_status(server: Running) -> None:
    """F077: a server's fault is 5xx and names the stage, streamed or not."""
    for stream in (False, True):
        status, message, _ = refusal(server, messages=user(), fail_at=0, stream=stream)
        assert status == 500 and "speaker" in message
    status, message, _ = refusal(server, messages=user(), modalities=["audio"], fail_singing_at=0)
    assert status == 500 and "singer" in message


def test_a_failure_in_mid_stream_is_an_event_and_no_finish_reason(server: Running) -> None:
    lines = server.http.post(
        "/v1/chat/completions", json={"messages": user(), "stream": True, "fail_at": 2, "delay_ms": 20}
    ).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["choices"][0]["delta"].get("content") for event in events[:-1]][-2:] == ["the", " quick"]
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    assert events[-1]["error"]["type"] == "server_error" and "speaker" in events[-1]["error"]["message"]
    with pytest.raises(openai.APIError, match="speaker"):
        list(server.openai.chat.completions.create(model="echo", messages=user(), stream=True, extra_body={"fail_at": 2, "delay_ms": 20}))


def test_a_failure_of_one_leaves_its_neighbours_alone(server: Running) -> None:
    async def both() -> list[Any]:
        async with server.async_openai() as client:

            async def one(**extra: Any) -> Any:
                asked: dict[str, Any] = {"model": "echo", "messages": user("one two three four"), "modalities": ["audio"]}
                return await client.chat.completions.create(**asked, extra_body={"delay_ms": 20, **extra})

            return await asyncio.gather(one(), one(fail_singing_at=2), one(), return_exceptions=True)

    good, bad, other = asyncio.run(both())
    assert isinstance(bad, openai.InternalServerError) and "singer" in str(bad)
    assert good.choices[0].message.audio.data == other.choices[0].message.audio.data


LONG = {"messages": user("word " * 300), "delay_ms": 1_000.0}
"""Five minutes of talking."""


def begin(server: Running, **body: Any) -> socket.socket:
    raw = json.dumps(LONG | body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
    return connection


@pytest.mark.parametrize("modality", ["text", "audio", "image"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request_everywhere(server: Running, stream: bool, modality: str) -> None:
    """F106, F107: streamed or not, and in every stage."""
    connection = begin(server, stream=stream, modalities=[modality])
    until(lambda: server.in_flight() == 1 and bool(server.held()))
    if stream and modality == "text":
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    until(lambda: not server.held())


def test_a_client_that_goes_away_before_anything_is_said(server: Running) -> None:
    """F106, F107: also while nothing is produced, and although only the server could notice."""
    connection = begin(server, stream=True, delay_ms=60_000.0)
    until(lambda: server.in_flight() == 1)
    connection.close()
    until(lambda: not server.held())


def test_a_client_that_does_not_read_goes_away(server: Running) -> None:
    """F106: with the buffers full of what it never took."""
    connection = begin(server, stream=True, modalities=["audio"], delay_ms=0.0, speed=0.25, messages=user("word " * 2_000))
    until(lambda: server.in_flight() == 1)
    connection.close()
    until(lambda: not server.held())
