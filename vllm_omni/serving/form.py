"""Bodies as web forms: multipart/form-data and urlencoded, as fields of strings and files.

What a string stands for is decided by the type of the field that it is for. It knows no protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from vllm_omni.errors import RequestError

TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")
MAX_PARTS = 1_000
MAX_TEXT = 64 << 20
"""Bytes of the longest field that is no file, which may hold one as base64. The whole body has a limit of its own."""
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of a form. `filename` and `media_type` are what the client said, "" if nothing."""

    filename: str
    media_type: str
    data: bytes = field(repr=False)


Value = str | Upload


class Form(dict[str, Value | list[Value]]):
    """The fields of a form by name. One that came more than once, or as `name[]`, is a list under `name`."""


async def read_body(http: HttpRequest) -> bytes | Form:
    """The fields of a form; of any other media type the bytes as they are. Raises RequestError for a form that is damaged.

    JSON that is called a form, as `curl -d` calls what it sends, is JSON.
    """
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in TYPES or (media_type == TYPES[1] and (await http.body()).lstrip().startswith(b"{")):
        return await http.body()
    fields = Form()
    try:
        async with http.form(max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=MAX_TEXT) as form:
            for key, value in form.multi_items():
                name, listed = key.removesuffix("[]"), key.endswith("[]")
                if isinstance(value, UploadFile):
                    read: Value = Upload(value.filename or "", value.content_type or "", await value.read())
                else:
                    read = value
                if name in fields or listed:
                    before = fields.get(name, [])
                    fields[name] = [*(before if isinstance(before, list) else [before]), read]
                else:
                    fields[name] = read
    except HTTPException as error:
        raise RequestError(f"The body cannot be read as a form: {error.detail}") from None
    return fields


def typed(value: Value | list[Value], to: type, name: str, items: str = "") -> Any:
    """A field's value as `to`: str, int, float, bool (true, false, 1 or 0), list or dict (both as JSON; a list also as repeated fields).

    What cannot be one stays a string: whoever checks the value says what is wrong with it. Raises RequestError for a file, and for a
    field that came more than once.
    """
    if isinstance(value, list):
        if to is not list:
            raise RequestError(f"'{name}' is given {len(value)} times: give it once.", param=name)
        by_name = {one.__name__: one for one in (str, int, float, bool)}
        return [typed(one, by_name.get(items, str), name) for one in value]
    if isinstance(value, Upload):
        raise RequestError(f"'{name}' must be text, not a file.", param=name)
    try:
        if to in (int, float):
            return to(value)
        if to in (list, dict):
            return msgspec.json.decode(value)
    except (ValueError, RecursionError):  # of msgspec's, too
        return value
    return TRUTHS.get(value.lower(), value) if to is bool else value
