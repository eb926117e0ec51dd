"""Detects a call that repeats an earlier one of its answer: the same function with equal JSON values as arguments."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal, InvalidOperation
from typing import Any

from fastdeploy_sd.text.tool_calls.json_scan import JsonScan


class CallHistory:
    """The calls of one answer, of which the last one may still be incomplete."""

    def __init__(self) -> None:
        self._complete: defaultdict[str, list[Any]] = defaultdict(list)  # function -> arguments of its calls
        self._name = ""
        self._text: list[str] = []
        # Of the last call, while it may repeat others:
        self._others: list[Any] = []
        self._scan = JsonScan()
        self._member: str | None = None
        self._value: list[str] = []

    def begin(self, name: str) -> None:
        """A call of a function begins."""
        self._name, self._others = name, [*self._complete[name]]
        self._scan, self._member = JsonScan(), None
        self._text.clear()
        self._value.clear()

    @property
    def may_repeat(self) -> bool:
        """Whether the last call may come to equal an earlier one: no complete member of its arguments differs."""
        return bool(self._others)

    def add(self, text: str) -> None:
        """Take more of the last call's arguments, which are valid JSON."""
        self._text.append(text)
        for char in text if self._others else "":
            self._scan.push(char)
            if self._member is not None and self._scan.member is None:
                value = _value("".join(self._value))
                self._others = [other for other in self._others if _is_equal(other.get(self._member), value)]
                self._value.clear()
            self._member = self._scan.member
            if self._member is not None:
                self._value.append(char)

    def close(self) -> bool:
        """Return whether the last call, which is complete, repeats an earlier one."""
        arguments = _value("".join(self._text))
        is_repeat = any(_is_equal(other, arguments) for other in self._others)
        self._complete[self._name].append(arguments)
        self._others = []
        return is_repeat


def _value(text: str) -> Any:
    """The value of JSON text, so that == tells whether values are equal; a text too deep to be read stands for it."""
    try:
        return json.loads(text, parse_int=_number, parse_float=_number)
    except RecursionError:
        return {None: text}


def _is_equal(a: object, b: object) -> bool:
    try:
        return a == b
    except RecursionError:
        return False


def _number(text: str) -> tuple[str, object]:
    """Unequal to true and false, to which Python's 1 and 0 are equal."""
    try:
        return "number", Decimal(text)
    except InvalidOperation:  # an exponent beyond all limits
        return "number", text
