"""Bounds what reading a JSON text builds, before it is read: a body of a few megabytes can hold millions of objects,
each of which takes fifty times its bytes. Looks at single characters only; whether the text is JSON is for the parser.
"""

from __future__ import annotations

import re
from itertools import chain

from fastdeploy_sd.errors import BadRequest

MAX_PARTS = 1 << 16
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def verify_shape(content: bytes) -> None:
    """Refuse a body with more objects, lists and fields than any request has use for; plain numbers do not count.

    Raises:
        BadRequest: there are more than MAX_PARTS.
    """
    if _num_parts(content, 0, len(content)) <= MAX_PARTS:
        return
    num_parts = start = 0  # again without what stands inside texts
    for text in chain(_STRING.finditer(content), (None,)):
        num_parts += _num_parts(content, start, text.start() if text else len(content))
        if num_parts > MAX_PARTS:
            raise BadRequest(f"body: expected at most {MAX_PARTS} objects, lists and fields in all, got more")
        start = text.end() if text else start


def _num_parts(content: bytes, start: int, end: int) -> int:
    return content.count(b"{", start, end) + content.count(b"[", start, end) + content.count(b":", start, end)
