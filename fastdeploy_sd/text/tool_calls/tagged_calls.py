"""Readers of calls whose parameters stand between tags, one by one; told as the JSON object that they come to."""

from __future__ import annotations

import json
from collections.abc import Callable

from fastdeploy_sd.text.tool_calls.call_format import CallableFunction, Functions
from fastdeploy_sd.text.tool_calls.json_scan import WHITESPACE, Malformed
from fastdeploy_sd.text.tool_calls.readers import (
    VoidReader,
    read_literal,
    read_one_of,
    read_space,
    read_text,
    read_until,
)
from fastdeploy_sd.text.tool_calls.scanner import Reader, Sink


def read_glm(sink: Sink, opening: str, functions: Functions) -> Reader:
    """A name, and keys and values between tags; a text stands there as it is, other values as JSON.

    Source: the template of zai-org/GLM-4.5.
    """
    first = yield from read_space()
    name, _ = yield from read_until("<", first)
    name = name.rstrip(WHITESPACE)
    sink.verify_name(name)
    arguments = _Arguments(sink, functions[name])
    tag = yield from read_one_of(("<arg_key>", "</tool_call>"), "<")
    while tag == "<arg_key>":
        key, _ = yield from read_until("<")
        yield from read_literal("</arg_key>", "<")
        yield from read_literal("<arg_value>", (yield from read_space()))
        yield from arguments.read_value(key, "</arg_value>", has_own_lines=False)
        tag = yield from read_one_of(("<arg_key>", "</tool_call>"), (yield from read_space()))
    arguments.end()


def read_qwen3_coder(sink: Sink, opening: str, functions: Functions) -> Reader:
    """A name and parameters in tags that hold their names; the outer tags are sometimes left out.

    Source: the template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
    """
    if opening == "<tool_call>":
        yield from read_literal("<function=", (yield from read_space()))
    name, _ = yield from read_until(">")
    sink.verify_name(name)
    arguments = _Arguments(sink, functions[name])
    tag = yield from read_one_of(("<parameter=", "</function>"), (yield from read_space()))
    while tag == "<parameter=":
        key, _ = yield from read_until(">")
        yield from arguments.read_value(key, "</parameter>", has_own_lines=True)
        tag = yield from read_one_of(("<parameter=", "</function>"), (yield from read_space()))
    arguments.end()
    if opening == "<tool_call>":
        yield from read_literal("</tool_call>", (yield from read_space()))


class _Arguments:
    """The parameters of a call so far. A call begins with its first value."""

    def __init__(self, sink: Sink, function: CallableFunction) -> None:
        self._sink = sink
        self._function = function
        self._keys: set[str] = set()

    def read_value(self, key: str, tag: str, *, has_own_lines: bool) -> VoidReader:
        """Read the value of a parameter up to a tag; raises Malformed of one that was given before."""
        if key in self._keys:
            raise Malformed
        if not self._keys:
            self._sink.begin(self._function.name)
        self._sink.arguments(("," if self._keys else "{") + json.dumps(key, ensure_ascii=False) + ":")
        self._keys.add(key)
        if key in self._function.text_parameters:
            self._sink.arguments('"')
            yield from read_text(tag, self._tell_text, has_own_lines=has_own_lines)
            self._sink.arguments('"')
            return
        pieces: list[str] = []
        keep: Callable[[str], None] = pieces.append
        yield from read_text(tag, keep, has_own_lines=has_own_lines)
        self._sink.arguments(_as_json("".join(pieces), is_text=key in self._function.nullable_texts))

    def _tell_text(self, text: str) -> None:
        self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        """There are no more parameters."""
        if not self._keys:
            self._sink.begin(self._function.name)
        self._sink.arguments("}" if self._keys else "{}")
        self._sink.close()


def _as_json(text: str, *, is_text: bool) -> str:
    """A value as JSON: it itself when it is JSON, of a text only if it is null, else as a text."""
    bare = text.strip(WHITESPACE)
    if is_text:
        return bare if bare == "null" else json.dumps(text, ensure_ascii=False)
    try:
        json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _refuse(name: str) -> None:
    raise ValueError(name)
