"""Reads calls that are messages to a function: a header that names it, and JSON."""

from __future__ import annotations

import re

from fastdeploy_sd.text.channels import (
    ASSISTANT,
    CALL,
    CHANNEL,
    CONSTRAIN,
    ENDS,
    FUNCTIONS,
    MARKS,
    MESSAGE,
    recipient_of,
)
from fastdeploy_sd.text.tool_calls.call_format import CallFormat, CallText, Functions
from fastdeploy_sd.text.tool_calls.json_scan import Malformed
from fastdeploy_sd.text.tool_calls.readers import CharReader, read_object, read_one_of, read_space
from fastdeploy_sd.text.tool_calls.scanner import Reader, Sink

_BARE = "to=" + FUNCTIONS
_MAX_HEADER_CHARS = 256
_HEADER_CHAR = re.compile(r"[\w .=\n-]")


def read_harmony(sink: Sink, opening: str, functions: Functions) -> Reader:
    """A message to a function. Its name is in the header after the role or after the channel.

    A function without parameters may have no text at all.

    Source: openai/harmony, docs/format.md, section "Function calling".
    """
    header = yield from _read_header(opening)
    name = recipient_of(header).removeprefix(FUNCTIONS)
    sink.verify_name(name)
    char = yield from read_space()
    if char != "<":
        yield from read_object(sink, char, name)
        char = yield from read_space()
        yield from read_one_of(ENDS, char)
        return
    yield from read_one_of(ENDS, char)
    sink.begin(name)
    sink.arguments("{}")
    sink.close()


def _read_header(opening: str) -> CharReader:
    """Read up to the mark of a message's text; return the header."""
    header = opening
    while not header.endswith(MESSAGE):
        char = yield
        if char == "<":
            header += yield from read_one_of((MESSAGE, CONSTRAIN, CHANNEL), char)
        elif _HEADER_CHAR.match(char) and len(header) < _MAX_HEADER_CHARS:
            header += char
        else:
            raise Malformed
    return header


HARMONY = CallFormat(
    models="gpt-oss",
    openings=(CHANNEL, ASSISTANT),
    first_openings=(_BARE,),
    read=read_harmony,
    text=CallText(
        before_name=f"{CHANNEL}commentary {_BARE}",
        before_arguments=f" {CONSTRAIN}json{MESSAGE}",
        after="",
        between=f"{CALL}{ASSISTANT}",
    ),
    other_messages=tuple(f"{channel}{MESSAGE}" for channel in ("analysis", "commentary", "final")),
    excluded_text=_BARE,
    markers=MARKS,
    signs=((f"{CHANNEL}commentary", CALL),),
)
