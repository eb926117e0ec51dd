"""Bytes of a request -> a validated body. Owns the size limit and the wording of what is wrong. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from fastdeploy_sd.entrypoints.openai.protocol import Body
from fastdeploy_sd.errors import BadRequest, PayloadTooLarge, suggest

_MAX_SHOWN_CHARS = 80
BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: HttpRequest, max_body_bytes: int) -> bytes:
    """Return the body of a request, reading no more than the limit allows.

    Raises:
        PayloadTooLarge: it is longer; also when it comes in chunks without a declared length.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise _too_large(max_body_bytes)
    return bytes(body)


def parse_body(body_type: type[BodyType], body: bytes) -> BodyType:
    """Return the validated body.

    Raises:
        BadRequest: not JSON, or a field is unknown, wrong or not supported; the text names it.
    """
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error, body_type) from None


def _too_large(max_body_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"body: expected at most {max_body_bytes} bytes, got more", code="body_too_large")


def _bad_request(error: ValidationError, body_type: type[Body]) -> BadRequest:
    """Describe the first wrong field."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(
            f"body: expected JSON, got {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    path = _path(first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    kind = first["type"]
    if kind == "extra_forbidden":
        return BadRequest(
            f"{path}: unknown field{suggest(str(first['loc'][-1]), _fields_at(body_type, first['loc'][:-1]))}",
            param=param,
        )
    if kind == "not_supported":
        return BadRequest(f"{path}: not supported: {first['msg']}", param=param, code="not_supported")
    if kind == "missing":
        return BadRequest(f"{path}: expected a value, got none", param=param)
    wanted = first["msg"].removeprefix("Input should be ")
    return BadRequest(f"{path or 'body'}: expected {wanted}, got {_shown(first['input'])}", param=param)


def _fields_at(body_type: type[Body], location: Sequence[int | str]) -> list[str]:
    """Names of the fields that the object at a place in the body may have."""
    for part in location:
        if isinstance(part, str):
            body_type = next(_bodies_in(body_type.model_fields[part].annotation))
    return list(body_type.model_fields)


def _bodies_in(hint: Any) -> Iterator[type[Body]]:
    if isinstance(hint, type) and issubclass(hint, Body):
        yield hint
    for argument in get_args(hint):
        yield from _bodies_in(argument)


def _path(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
