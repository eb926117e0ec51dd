"""Arguments of earlier tool calls, as chat templates get them; a template writes them back unchanged."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# Python converts no longer text to an integer.
_MAX_DIGITS = 4300


class Number(float):
    """A number that is written in other characters than Python's; `text` is its JSON."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> Number:
        """Return the number; one that no float holds counts as infinite, but keeps its characters."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class Arguments(dict[str, Any]):
    """Arguments that are a JSON object; where templates join them with other text, they are their JSON `text`."""

    def __init__(self, parts: Mapping[str, Any], text: str) -> None:
        super().__init__(parts)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


class Unparsed(str):
    """Arguments that are no JSON object. Reading them as one raises TypeError."""

    __slots__ = ()

    def __iter__(self) -> NoReturn:
        raise TypeError("the arguments of a call are no JSON object")


def template_arguments(arguments: str | Mapping[str, Any]) -> Arguments | Unparsed:
    """Return what a template gets for the arguments of a call; "" are none."""
    if not isinstance(arguments, str):
        return Arguments(arguments, to_json(arguments, ensure_ascii=False))
    text = arguments or "{}"
    try:
        parts = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return Unparsed(text)
    return Arguments(parts, text) if isinstance(parts, dict) else Unparsed(text)


def to_json(value: Any, **options: Any) -> str:
    """Return JSON in which numbers and arguments of calls are written as they came; options are those of json.dumps."""
    kept: list[str] = []
    nonce = str(secrets.randbits(128))

    def marked(part: Any) -> Any:
        if isinstance(part, Number | Unparsed):
            kept.append(part.text if isinstance(part, Number) else str.__str__(part))
            return f"{nonce}:{len(kept) - 1}"
        if isinstance(part, Mapping):
            return {key: marked(item) for key, item in part.items()}
        if isinstance(part, Sequence) and not isinstance(part, str):
            return [marked(item) for item in part]
        return part

    text = json.dumps(marked(value), **options)
    return re.sub(f'"{nonce}:([0-9]+)"', lambda m: kept[int(m[1])], text) if kept else text


def holds_all(value: Any) -> bool:
    """Return whether each number of a JSON value is one that a float holds."""
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(holds_all, parts))


def _integer(text: str) -> int | Number:
    if len(text) > _MAX_DIGITS:
        return Number(text)
    number = int(text)
    return number if str(number) == text else Number(text)


def _number(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else Number(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
