"""Checks JSON character by character, so that it can be passed on before it is complete. Builds no values.

Source: RFC 8259.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

WHITESPACE = " \t\n\r"
_WORDS = ("true", "false", "null")
_WORD_STARTS = frozenset("tfn")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_HEX = frozenset("0123456789abcdefABCDEF")
_NUM_HEX = 4  # in an escape
_ESCAPES = frozenset('"\\/bfnrtu')


class Malformed(Exception):  # noqa: N818 - a verdict about a text, not a failure
    """The text is not what it would have to be."""


class _Expect(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of the list
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    COLON = auto()
    COMMA = auto()  # or the end of the list or object
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()


class JsonScan:
    """The scan of one object or list; `member` is the outermost key of the last character, None = it has none."""

    def __init__(self) -> None:
        self.member: str | None = None
        self._is_over = False
        self._expect = _Expect.VALUE
        self._open: list[str] = []
        self._text: list[str] = []  # of the scalar, or of the key at depth 1
        self._is_key = False
        self._num_hex = 0
        self._key = ""

    def push(self, char: str) -> bool:
        """Take the next character; return whether the value is complete with it; raises Malformed."""
        is_inside = len(self._open) > 1 or (len(self._open) == 1 and self._expect in _TEXTUAL and not self._is_key)
        if self._expect is _Expect.SCALAR:
            if self._continues_scalar(char):
                return self._belongs(is_inside)
            self._end_scalar()
            is_inside = len(self._open) > 1
        if self._expect in _TEXTUAL:
            self._string(char)
        elif char not in WHITESPACE:
            begins = self._structure(char)
            is_inside = is_inside or (begins and bool(self._open))
        return self._belongs(is_inside)

    def _belongs(self, is_inside: bool) -> bool:
        self.member = self._key if is_inside else None
        return self._is_over

    def _structure(self, char: str) -> bool:
        """Take a character between texts; return whether a value begins with it inside of another."""
        expect, inner = self._expect, self._open[-1:]
        if expect in (_Expect.VALUE, _Expect.FIRST_VALUE) and char != "]":
            is_inner = bool(self._open)
            self._begin_value(char)
            return is_inner
        ends_list = char == "]" and expect in (_Expect.FIRST_VALUE, _Expect.COMMA) and inner == ["["]
        ends_object = char == "}" and expect in (_Expect.FIRST_KEY, _Expect.COMMA) and inner == ["{"]
        if ends_list or ends_object:
            self._open.pop()
            self._expect, self._is_over = _Expect.COMMA, not self._open
        elif char == '"' and expect in (_Expect.KEY, _Expect.FIRST_KEY):
            self._expect, self._is_key, self._text = _Expect.STRING, True, [char]
        elif char == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
        elif char == "," and expect is _Expect.COMMA:
            self._expect = _Expect.KEY if inner == ["{"] else _Expect.VALUE
        else:
            raise Malformed
        return False

    def _begin_value(self, char: str) -> None:
        if char in "{[":
            self._open.append(char)
            self._expect = _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_VALUE
        elif not self._open:
            raise Malformed
        elif char == '"':
            self._expect, self._is_key = _Expect.STRING, False
        else:
            self._expect, self._is_key, self._text = _Expect.SCALAR, False, []
            if not self._continues_scalar(char):
                raise Malformed

    def _string(self, char: str) -> None:
        is_kept = self._is_key and len(self._open) == 1
        if is_kept:
            self._text.append(char)
        if self._expect is not _Expect.STRING:
            self._escape(char)
        elif char == "\\":
            self._expect = _Expect.ESCAPE
        elif char == '"':
            self._expect = _Expect.COLON if self._is_key else _Expect.COMMA
            if is_kept:
                self._key = json.loads("".join(self._text))
        elif char < " ":
            raise Malformed

    def _escape(self, char: str) -> None:
        if self._expect is _Expect.HEX:
            if char not in _HEX:
                raise Malformed
            self._num_hex += 1
        elif char not in _ESCAPES:
            raise Malformed
        elif char == "u":
            self._expect, self._num_hex = _Expect.HEX, 0
            return
        if self._expect is _Expect.ESCAPE or self._num_hex == _NUM_HEX:
            self._expect = _Expect.STRING

    def _continues_scalar(self, char: str) -> bool:
        """Take a character of a number or a word; False = it comes after them."""
        if (self._text and self._text[0] not in _NUMBER_CHARS) or char in _WORD_STARTS:
            belongs = any(word.startswith("".join((*self._text, char))) for word in _WORDS)
        else:
            belongs = char in _NUMBER_CHARS
        if belongs:
            self._text.append(char)
        return belongs

    def _end_scalar(self) -> None:
        text = "".join(self._text)
        if text not in _WORDS and not _NUMBER.fullmatch(text):
            raise Malformed
        self._expect = _Expect.COMMA


_TEXTUAL = frozenset({_Expect.STRING, _Expect.ESCAPE, _Expect.HEX, _Expect.SCALAR})
