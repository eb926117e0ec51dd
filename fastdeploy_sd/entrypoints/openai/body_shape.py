"""Checks of a JSON text that only look at its bytes. A body of a few megabytes can hold millions of objects,
each of which takes fifty times its bytes; so they are counted before it is parsed. And a parser silently keeps the last
of several values of one name; so doubled names are looked for.
"""

from __future__ import annotations

import json
from typing import Any

from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.wire.http.json_texts import between_texts

MAX_PARTS = 1 << 16


def verify_shape(content: bytes) -> None:
    """Refuse a body with more objects, lists and fields than any request has use for; plain numbers do not count.

    Raises BadRequest: there are more than MAX_PARTS.
    """
    if _num_parts(content, 0, len(content)) <= MAX_PARTS:
        return
    num_parts = 0
    for start, end in between_texts(content):
        num_parts += _num_parts(content, start, end)
        if num_parts > MAX_PARTS:
            raise BadRequest(f"body: expected at most {MAX_PARTS} objects, lists and fields in all, got more")


def verify_names_once(content: bytes, value: dict[str, Any]) -> None:
    """Refuse JSON in which an object has a name twice: which of the values is meant cannot be known.

    `value`: what a parser made of it: an object, with the last value of each name. Raises BadRequest: a name is there
    twice; the first such is named.
    """
    num_names = _num_names(value)
    if content.count(b":") == num_names:
        return
    if sum(content.count(b":", start, end) for start, end in between_texts(content)) > num_names:
        json.loads(content, object_pairs_hook=_verified_object, parse_int=str, parse_float=str)


def _verified_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise BadRequest(f"body: expected every name in an object once, got {shown(name)} twice", param=name[:64])
        names.add(name)
    return dict(pairs)


def _num_names(value: dict[str, Any] | list[Any]) -> int:
    num_own, parts = (len(value), value.values()) if isinstance(value, dict) else (0, value)
    return num_own + sum(_num_names(part) for part in parts if isinstance(part, (dict, list)))


def _num_parts(content: bytes, start: int, end: int) -> int:
    return content.count(b"{", start, end) + content.count(b"[", start, end) + content.count(b":", start, end)
