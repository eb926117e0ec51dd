"""Finds the strings of a JSON text by its bytes, without parsing it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TEXT_VALUE = re.compile(rb"\s*:\s*(" + _STRING.pattern + rb")", re.DOTALL)


def between_texts(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the limits of what comes before, between and after the strings of a JSON text."""
    start = 0
    for text in chain(_STRING.finditer(content), (None,)):
        yield start, text.start() if text else len(content)
        start = text.end() if text else start


def text_field(content: bytes, name: str) -> str | None:
    """Return the string that the outermost object has under a name; None = it has none, or is no JSON."""
    key = json.dumps(name).encode("ascii")
    if key not in content:
        return None
    depth = 0
    for start, end in between_texts(content):
        depth += _num_open(content, start, end)
        if depth == 1 and content.startswith(key, end) and (found := _TEXT_VALUE.match(content, end + len(key))):
            return _parsed(found[1])
    return None


def _num_open(content: bytes, start: int, end: int) -> int:
    opened = content.count(b"{", start, end) + content.count(b"[", start, end)
    return opened - content.count(b"}", start, end) - content.count(b"]", start, end)


def _parsed(text: bytes) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
