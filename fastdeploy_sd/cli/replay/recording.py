"""Reads recorded conversations: JSON lines `{"messages": [{"role", "content"}]}`, each checked; each may have an `id`.

A conversation becomes one token sequence, message after message; an assistant's message is a response whose prompt is
everything before it. No chat template is applied: a recording may have roles that a template does not know, and the
few tokens between messages hardly change what can be drafted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_sd.cli.replay.encoding import TextEncoder
from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.types import I32

_RESPONDER = "assistant"
_LINE_KEYS = ("id", "messages")
_MESSAGE_KEYS = ("role", "content")


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One line.

    Attributes:
        id: as given, or the number of its line.
        token_ids: i32[N], all messages.
        responses: [begin, end) of every response in token_ids, in order; begin >= 1, as its role comes before it. The
            last token of a response is the one that ends it.
    """

    id: str
    token_ids: I32
    responses: tuple[tuple[int, int], ...]


def read_recording(
    path: Path, encoder: TextEncoder, on_line: Callable[[int], object] | None = None
) -> list[Conversation]:
    """Read a file; empty lines are passed over.

    `on_line`: told the size of each line in bytes, for a progress bar. Raises ConfigError: the file cannot be read, has
    a bad line (the text names line and field), or has no response.
    """
    conversations = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    conversations.append(_read_line(line, number, f"{path}, line {number}", encoder))
                if on_line is not None:
                    on_line(len(line))
    except OSError as error:
        raise ConfigError(f"file: expected a readable file, got {path} ({error.strerror})") from None
    if not any(c.responses for c in conversations):
        raise ConfigError(f"{path}: expected at least one assistant message, got none")
    return conversations


def _read_line(line: bytes, number: int, where: str, encoder: TextEncoder) -> Conversation:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a JSON object, got text that is none: {error}") from None
    fields = _fields({"id": str(number)} | value if isinstance(value, dict) else value, _LINE_KEYS, where)
    if not isinstance(fields["id"], str):
        raise ConfigError(f"{where}: id: expected text, got {fields['id']!r}")
    if not isinstance(fields["messages"], list):
        raise ConfigError(f"{where}: messages: expected a list, got {type(fields['messages']).__name__}")
    pieces: list[I32] = []
    responses = []
    length = 0
    for is_response, token_ids in _pieces(fields["messages"], where, encoder):
        if is_response:
            responses.append((length, length + len(token_ids)))
        pieces.append(token_ids)
        length += len(token_ids)
    return Conversation(fields["id"], np.concatenate([np.zeros(0, np.int32), *pieces]), tuple(responses))


def _pieces(messages: list[Any], where: str, encoder: TextEncoder) -> Iterator[tuple[bool, I32]]:
    """Yield (is it a response, token ids) in order: the head of each message, then its text and end."""
    for i, message in enumerate(messages):
        place = f"{where}: messages[{i}]"
        fields = _fields(message, _MESSAGE_KEYS, place)
        for key in _MESSAGE_KEYS:
            if not isinstance(fields[key], str):
                raise ConfigError(f"{place}.{key}: expected text, got {fields[key]!r}")
        yield False, np.array(encoder.encode(fields["role"] + "\n"), np.int32)
        body = [*encoder.encode(fields["content"]), encoder.end_token_id]
        yield fields["role"] == _RESPONDER, np.array(body, np.int32)


def _fields(value: object, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object with {' and '.join(keys)}, got {type(value).__name__}")
    for key in value:
        if key not in keys:
            raise ConfigError(f"{where}: {key}: unknown field{suggest(str(key), keys)}")
    for key in keys:
        if key not in value:
            raise ConfigError(f"{where}: {key}: expected a value, got nothing")
    return value
