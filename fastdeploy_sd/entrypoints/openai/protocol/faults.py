"""Makes one error of all faults of a body, in JSON's words and not in those of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fastdeploy_sd.errors import BadRequest, shown

MAX_FAULTS = 5
# Kind of pydantic's error -> what was expected. All that the bodies' fields can have; a test tries each field.
_WANTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "expected": lambda context: str(context["text"]),
    "string_type": lambda _: "text",
    "int_type": lambda _: "an integer",
    "int_from_float": lambda _: "an integer",
    "bool_type": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "string_too_long": lambda context: f"at most {context['max_length']} characters",
    "too_long": lambda context: f"at most {context['max_length']} entries",
}
# Kinds about the size of what came, which is shown in its place.
_OF_SIZE = ("string_too_long", "too_long")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, with the field at the top of the body and a short machine-readable reason."""

    message: str
    param: str | None = None
    code: str | None = None


def refusal(faults: Sequence[Fault]) -> BadRequest:
    """Return the error that lists the first few faults; `param` and `code` are the first one's."""
    texts = [fault.message for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        texts.append(f"and {len(faults) - MAX_FAULTS} more")
    return BadRequest("; ".join(texts), param=faults[0].param, code=faults[0].code)


def faults_of(error: ValidationError, where: Mapping[str, str]) -> list[Fault]:
    """Return what a validation found; `where` maps a top-level name to what to write before it."""
    return [_fault(details, where) for details in error.errors(include_url=False)]


def _fault(details: ErrorDetails, where: Mapping[str, str]) -> Fault:
    location, kind, context = details["loc"], details["type"], details.get("ctx", {})
    path, param = _path(location), str(location[0]) if location else None
    path = where.get(param or "", "") + path
    # The kinds of fields.py come first. Below: the text begins with a name inside the object.
    if kind == "below":
        return Fault(f"{path}.{context['text']}", param)
    if kind == "inside":  # the text begins with a place inside the list
        return Fault(f"{path}{context['text']}", param)
    if kind == "not_supported":
        return Fault(f"{path}: not supported: {context['text']}", param, "not_supported")
    if kind == "missing":
        return Fault(f"{path}: expected a value, got none", param)
    if kind == "refused":
        return Fault(f"{path}: {context['text']}", param)
    size = len(details["input"]) if kind in _OF_SIZE else None
    return Fault(f"{path or 'body'}: expected {_WANTED[kind](context)}, got {size or shown(details['input'])}", param)


def _path(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
