"""The fields of a request body: which are known, which have an effect, and what is said of the others.

Every field is one of: the protocol's own; a parameter that a stage of the served graph declares; known and without effect by
nature; known, with an effect this server does not give, and then accepted at its neutral value only. Anything else is refused
with the nearest known name. Wrong types and values are refused by name. A null is a field that was not given. The model's parameters
may also stand in an object of their own, under one of the names in `EXTRA`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from vllm_omni.errors import RequestError, did_you_mean
from vllm_omni.param import Param
from vllm_omni.serving.form import Form, typed

Silent = Mapping[str, type]
Neutral = Mapping[str, tuple[Any, ...]]

EXTRA = ("extra_params", "extra_args", "extra_body")
"""An object of further model parameters. In a form it is JSON."""


class Fields(BaseModel):
    """An object in a request body: strict types, no unknown field.

    `silent` names what has no effect by nature, with its type; `neutral` the values at which a field has none here.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    silent: ClassVar[Silent] = {}
    neutral: ClassVar[Neutral] = {}

    @classmethod
    def known(cls) -> set[str]:
        return {*cls.model_fields, *cls.silent, *cls.neutral}

    @classmethod
    def is_neutral(cls, name: str, value: Any) -> bool:
        """Whether a field has no effect at this value. A truth value is not a number."""
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in cls.neutral.get(name, ()))

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name not in cls.known():
                raise RequestError(f"Unknown field '{name}'.{did_you_mean(name, cls.known())}", param=name)
            elif value is None or cls.is_neutral(name, value):
                continue
            elif name in cls.silent:
                Param(name, cls.silent[name]).check(value)
            else:
                allowed = "".join(f" or {msgspec.json.encode(value).decode()}" for value in cls.neutral[name])
                raise RequestError(f"'{name}' is not supported here: leave it out, or give null{allowed}.", param=name)
        return kept

    @classmethod
    def of(cls, data: Any, path: str = "", *, strict: bool = True) -> Self:
        """`data` checked. `path` is where it is in the body, for the RequestError that a fault raises.

        Unless `strict`, a string may stand for what it says.
        """
        try:
            return cls.model_validate(data, strict=strict)
        except ValidationError as error:
            raise _readable(error, path) from None


VoiceName = Annotated[str, BeforeValidator(lambda voice: voice.get("id") if isinstance(voice, dict) and set(voice) == {"id"} else voice)]
"""A voice: its name, or OpenAI's object `{"id": name}`."""


class Body(Fields):
    """A whole request body. `parameters` names what OpenAI lets a client set and a model may declare; `renamed` maps other
    names for a declared parameter to it; of the `listed` ones a single text may stand for a list of it; `unset` has the values of
    parameters that leave the choice to the model."""

    parameters: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[Mapping[str, str]] = {}
    listed: ClassVar[frozenset[str]] = frozenset()
    unset: ClassVar[Neutral] = {}

    @classmethod
    def read(cls, raw: bytes | Form, declared: Mapping[str, Param]) -> tuple[Self, dict[str, Any]]:
        """The protocol's fields, and the values given for the model's `declared` parameters. Raises RequestError."""
        given = raw if isinstance(raw, Form) else decode_json(raw)
        own: dict[str, Any] = {}
        params: dict[str, Any] = {}
        for name, field, value in _spread(given):
            target = cls.renamed.get(name, name)
            if isinstance(given, Form) and field == name:
                value = cls._meant(name, value, declared.get(target))
            chosen = target in declared or (name in cls.parameters and not cls.is_neutral(name, value))
            if field == name and (name in cls.model_fields or (not chosen and name in cls.known())):
                own[name] = value
            elif not chosen:
                known = {*cls.known(), *cls.parameters, *EXTRA} if field == name else set()
                raise RequestError(f"Unknown field '{field}'.{did_you_mean(name, {*known, *declared})}", param=field)
            elif value is not None and value not in cls.unset.get(name, ()):
                if target in params or (field != name and given.get(name) is not None):
                    raise RequestError(f"'{field}' is given under two names: give one of them.", param=field)
                listed = [value] if name in cls.listed and isinstance(value, str) else value
                params[target] = checked(declared, target, listed, field)
        return cls.of(own, strict=not isinstance(given, Form)), params

    @classmethod
    def _meant(cls, name: str, value: Any, param: Param | None) -> Any:
        """What a form's field means. The protocol's own fields are read with their types later."""
        if name in cls.model_fields:
            return value
        if param:
            return typed(value, param.type, name, param.items)
        if name in cls.silent:
            return typed(value, cls.silent[name], name)
        return next((same for same in cls.neutral.get(name, ()) if typed(value, type(same), name) == same), value)

    @classmethod
    def schema_for(cls, declared: Mapping[str, Param], *media_types: str) -> dict[str, Any]:
        """The body as OpenAPI shows it, the model's parameters included; JSON, and what `media_types` names."""
        schema = cls.model_json_schema()
        types = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
        for param in declared.values():
            about = {"type": types[param.type], "description": param.help, "default": param.default, "enum": list(param.choices)}
            bounds = {"minimum": param.minimum, "maximum": param.maximum}
            schema["properties"].setdefault(param.name, {}).update({k: v for k, v in (about | bounds).items() if v not in (None, "", [])})
        about = {"type": "object", "description": "further parameters of the model"}
        schema["properties"] |= dict.fromkeys(EXTRA, about)
        content = {media_type: {"schema": schema} for media_type in ("application/json", *media_types)}
        return {"requestBody": {"required": True, "content": content}}


def _spread(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The name of each field, where it is in the body, and its value: those of an `EXTRA` object like those beside it."""
    for name, value in given.items():
        if name not in EXTRA:
            yield name, name, value
            continue
        inner = typed(value, dict, name) if isinstance(given, Form) else value
        if inner is not None and not isinstance(inner, dict):
            raise RequestError(f"'{name}' must be an object of the model's parameters, not {_shown(inner)}.", param=name)
        yield from ((key, f"{name}.{key}", part) for key, part in (inner or {}).items())


def checked(declared: Mapping[str, Param], name: str, value: Any, field: str) -> Any:
    """The checked value of a parameter that came in `field`. Raises RequestError, also if the model does not declare it."""
    if name not in declared:
        raise RequestError(f"This model has no parameter '{name}'.{did_you_mean(name, declared)}", param=field)
    return dataclasses.replace(declared[name], name=field).check(value)


def decode_json(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestError for anything else."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not a JSON object: {error}.") from None


def _readable(error: ValidationError, path: str) -> RequestError:
    """The first fault that pydantic found, in a sentence that names the field."""
    first = error.errors(include_url=False)[0]
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, RequestError):
        param = f"{path}.{inner.param}" if path else inner.param
        return RequestError(inner.message if param == inner.param else f"In '{path}': {inner.message}", param=param)
    if first["type"] == "missing":
        return RequestError(f"'{path}' is required.", param=path)
    rule = first["msg"].replace("Input should", "must", 1)
    return RequestError(f"'{path or 'The body'}' {rule}, not {_shown(first['input'])}.", param=path or None)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else "an object" if isinstance(value, dict) else "an array"
    return text if len(text) <= 80 else text[:77] + "…"
