"""Errors, payloads, requests and parameters: small values that mean the same in every process."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import vllm_omni
from vllm_omni import api, errors
from vllm_omni.errors import OmniError, RequestError, StageError, did_you_mean, from_message
from vllm_omni.param import Param, check_all
from vllm_omni.payload import AUDIO, IMAGE, PUBLIC_KINDS, TEXT, Kind, Payload, action, audio, image, text, video
from vllm_omni.request import Message, Request, new_id

KINDS_OF_ERROR = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, OmniError) and cls is not OmniError]


@pytest.mark.parametrize("cls", KINDS_OF_ERROR, ids=lambda cls: cls.__name__)
def test_an_error_crosses_processes(cls: type[OmniError]) -> None:
    error = cls("what, where, what to do", param="voice", stage="talker")
    message = json.loads(json.dumps(error.to_message()))
    again = from_message(message)
    assert type(again) is cls
    assert (again.message, str(again), again.param, again.stage) == (error.message, error.message, "voice", "talker")
    assert again.to_message() == message


def test_an_error_tells_what_it_is() -> None:
    assert len(KINDS_OF_ERROR) == 10
    assert len({cls.code for cls in KINDS_OF_ERROR}) == 10
    for cls in KINDS_OF_ERROR:
        assert 400 <= cls.status <= 504
        assert any(base.__module__ == "builtins" for base in cls.__bases__), "it is not caught by who knows the standard library only"
    assert issubclass(RequestError, ValueError)


def test_fields_that_are_not_set_are_not_sent() -> None:
    assert RequestError("no").to_message() == {"type": "RequestError", "message": "no"}


@pytest.mark.parametrize("message", [{}, {"type": "KeyError"}, {"type": "OmniError", "message": "m"}])
def test_an_unknown_error_is_the_stages(message: dict[str, str]) -> None:
    assert type(from_message(message)) is StageError
    assert from_message(message).message


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("voise", ["voice", "speed"], " Did you mean 'voice'?"),
        ("xyz", ["voice", "speed"], " Known: speed, voice."),
        ("xyz", [], ""),
        ("xyz", [str(number) for number in range(100, 140)], f" Known: {', '.join(map(str, range(100, 130)))}, …."),
    ],
)
def test_did_you_mean(word: str, known: list[str], hint: str) -> None:
    assert did_you_mean(word, known) == hint


# ---- parameters


@pytest.mark.parametrize(
    ("param", "value", "checked"),
    [
        (Param("p", int), 3, 3),
        (Param("p", float), 3, 3.0),
        (Param("p", float), 0.5, 0.5),
        (Param("p", bool), False, False),
        (Param("p", str), "", ""),
        (Param("p", list), [1], [1]),
        (Param("p", dict), {"a": 1}, {"a": 1}),
        (Param("p", int, minimum=1, maximum=3), 1, 1),
        (Param("p", int, minimum=1, maximum=3), 3, 3),
        (Param("p", str, choices=("a", "b")), "b", "b"),
    ],
)
def test_a_good_value_passes(param: Param, value: Any, checked: Any) -> None:
    result = param.check(value)
    assert (result, type(result)) == (checked, type(checked))


@pytest.mark.parametrize(
    ("param", "value", "complaint"),
    [
        (Param("p", int), "3", "'p' must be of type int, not '3'."),
        (Param("p", int), 3.0, "'p' must be of type int, not 3.0."),
        (Param("p", int), True, "'p' must be of type int, not True."),
        (Param("p", float), True, "'p' must be of type float, not True."),
        (Param("p", bool), 1, "'p' must be of type bool, not 1."),
        (Param("p", int), None, "'p' must be of type int, not None."),
        (Param("p", int, minimum=1), 0, "'p' must be at least 1, not 0."),
        (Param("p", float, maximum=2.5), 3, "'p' must be at most 2.5, not 3.0."),
        (Param("p", float), float("nan"), "'p' must be a number, not nan."),
        (Param("p", float, maximum=1), float("inf"), "'p' must be at most 1, not inf."),
        (Param("p", str, choices=("a", "b")), "c", "'p' must be one of a, b, not 'c'."),
        (Param("p", str, choices=tuple(f"voice{n}" for n in range(9))), "voic3", "Did you mean 'voice3'?"),
        (Param("p", str, choices=("a",)), "x" * 1000, "x…."),
    ],
)
def test_a_bad_value_is_refused_by_name_and_remedy(param: Param, value: Any, complaint: str) -> None:
    with pytest.raises(RequestError) as error:
        param.check(value)
    assert complaint in str(error.value)
    assert error.value.param == "p"
    assert len(str(error.value)) < 300


def test_names_that_are_not_declared_are_refused() -> None:
    declared = [Param("voice", str), Param("speed", float)]
    assert check_all(declared, {"speed": 2}, "Model 'm'") == {"speed": 2.0}
    with pytest.raises(RequestError, match=r"Model 'm' has no parameter 'voise'. Did you mean 'voice'\?") as error:
        check_all(declared, {"voise": "x"}, "Model 'm'")
    assert error.value.param == "voise"


# ---- payloads and requests


def test_kinds_are_equal_by_name() -> None:
    assert Kind("codes", "int64 [n]") == Kind("codes", "int32 [m]") != Kind("latents")
    assert len({Kind("codes", "a"), Kind("codes", "b")}) == 1
    assert list(PUBLIC_KINDS) == ["text", "image", "audio", "video", "action", "progress"]


def test_payloads_say_what_they_are() -> None:
    assert text("hi", tokens=1) == Payload(TEXT, "hi", {"tokens": 1})
    assert audio([0.0], 16_000, role="user").meta == {"rate": 16_000, "role": "user"}
    assert video([], 2.0).meta == {"fps": 2.0}
    assert (image([]).kind.name, action([]).kind.name) == ("image", "action")


def test_a_request_keeps_the_shape_of_the_conversation() -> None:
    said = (Message("user", (text("look"), image([], detail="high"))), Message("assistant", (text("I see"),)))
    parts = list(Request(messages=said, outputs=(AUDIO,)).payloads())
    turns = [(part.kind, part.meta["role"], part.meta["turn"]) for part in parts]
    assert turns == [(TEXT, "user", 0), (IMAGE, "user", 0), (TEXT, "assistant", 1)]
    assert parts[1].meta["detail"] == "high"
    assert Request.of("hi", params={"speed": 2}).messages == (Message("user", (text("hi"),)),)


def test_ids_are_not_given_twice() -> None:
    assert len({Request.of("x").id for _ in range(1000)} | {new_id("other") for _ in range(1000)}) == 2000


# ---- the one module a plugin imports


def test_what_plugins_import_exists() -> None:
    assert [name for name in api.__all__ if not hasattr(api, name)] == []
    assert {"ModelPlugin", "OneShotModule", "RequestError", "StageGraph"} <= set(api.__all__)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Omnibus'"):
        vllm_omni.Omnibus  # type: ignore[attr-defined] # noqa: B018
