"""A value a stage can be given by a client (a request parameter) or by a recipe (a stage argument).

Declared, so that what nobody would use can be refused by name. It checks values; it does not decide where they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni.errors import RequestError, did_you_mean


@dataclass(frozen=True, slots=True)
class Param:
    """A named, typed value. `type` is str, int, float, bool, list or dict; bounds are inclusive; `default` None means unset.
    `small` is what a request for nothing but a sign of life gives; None: nothing.

    `items` is the name of the type that all items of a list have ("str"), "" for any.
    """

    name: str
    type: type
    default: Any = None
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    help: str = ""
    items: str = ""
    small: Any = None

    def check(self, value: Any) -> Any:
        """`value` as this parameter's type. Raises RequestError that names the parameter, the value and the remedy."""
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (isinstance(value, bool) and self.type is not bool):
            raise self._wrong(value, f"must be of type {self.type.__name__}")
        if isinstance(value, list) and self.items and any(type(item).__name__ != self.items for item in value):
            raise self._wrong(value, f"must be a list of {self.items}")
        if self.choices and value not in self.choices:
            known = [str(choice) for choice in self.choices]
            raise self._wrong(value, f"must be one of {', '.join(known)}", did_you_mean(str(value), known) if len(known) > 8 else "")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if value != value:
                raise self._wrong(value, "must be a number")
            if self.minimum is not None and value < self.minimum:
                raise self._wrong(value, f"must be at least {self.minimum}")
            if self.maximum is not None and value > self.maximum:
                raise self._wrong(value, f"must be at most {self.maximum}")
        return value

    def _wrong(self, value: Any, rule: str, hint: str = "") -> RequestError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "…"
        return RequestError(f"'{self.name}' {rule}, not {shown}.{hint}", param=self.name)


def check_all(declared: Iterable[Param], given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The checked values of `given`. A name that is not declared raises RequestError; `owner` says whose names these are."""
    by_name = {param.name: param for param in declared}
    for name in given:
        if name not in by_name:
            raise RequestError(f"{owner} has no parameter '{name}'.{did_you_mean(name, by_name)}", param=name)
    return {name: by_name[name].check(value) for name, value in given.items()}
