"""Conversations of a simulated deployment's clients: when they begin, and what each turn adds and waits.

Texts are numbers: equal beginnings are equal tokens, so that prefix caches and routers find what they would find. All
outputs are one token over and over; a conversation's next prompt holds them as it would in reality.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import I32

OUTPUT_TOKEN = 3
VOCAB_SIZE = 1 << 15
MAX_MODEL_LEN = 1 << 15
_FIRST_TOKEN = 4
_BYTES_PER_TOKEN = 4
_MAX_TURNS = 12
_SPREAD = 0.8  # of the logarithms of lengths
_ZIPF = 1.1  # popularity of the shared prompts


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client adds, i32[n], how many tokens it gets, and how many seconds after the last turn's end it asks;
    `due_s`: not before that time.
    """

    added: I32
    num_output: int
    pause_s: float = 0.0
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after the other."""

    begin_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """A seeded mix of conversations; `rate`: requests per second, lengths in tokens are medians."""

    num_requests: int
    rate: float
    seed: int
    num_shared: int = 50
    shared_len: int = 400
    added_len: int = 60
    output_len: int = 100
    num_turns: float = 4.0
    pause_s: float = 5.0

    def conversations(self) -> Iterator[Conversation]:
        """Yield them in the order of their beginnings, with `num_requests` turns in all; none has another's text."""
        rng = np.random.default_rng(self.seed)
        shared = [_text(rng, _length(rng, self.shared_len)) for _ in range(self.num_shared)]
        weights = 1.0 / np.arange(1, self.num_shared + 1) ** _ZIPF
        weights /= weights.sum()
        begin_s, num_left = 0.0, self.num_requests
        while num_left:
            begin_s += rng.exponential(self.num_turns / self.rate)
            count = min(int(rng.geometric(1 / self.num_turns)), _MAX_TURNS, num_left)
            num_left -= count
            prompt = shared[int(rng.choice(self.num_shared, p=weights))]
            turns = []
            for number in range(count):
                added = _text(rng, _length(rng, self.added_len))
                turns.append(
                    Turn(
                        np.concatenate([prompt, added]) if number == 0 else added,
                        _length(rng, self.output_len),
                        float(rng.exponential(self.pause_s)) if self.pause_s else 0.0,
                    )
                )
            yield Conversation(begin_s, tuple(turns))


def recorded(path: Path, mix: Mix) -> Iterator[Conversation]:
    """Yield recorded conversations over and over, until they have as many requests as the mix, which begin at its rate.

    The file has one JSON object a line: {"messages": [{"role": .., "content": ..}, ..]}. Four bytes count as a token;
    each repetition has other users' texts after the first message.

    Raises:
        ConfigError: it is not readable, or holds no answer.
    """
    recordings = [found for found in (_answers(path, number, line) for number, line in _lines(path)) if found]
    if not recordings:
        raise ConfigError(f"recording: expected conversations with answers, got none in {path}", param="recording")
    rng = np.random.default_rng(mix.seed)
    num_left, number, begin_s = mix.num_requests, 0, 0.0
    mean_turns = sum(map(len, recordings)) / len(recordings)
    while num_left:
        turns = recordings[number % len(recordings)][:num_left]
        key = (number // len(recordings)) << 3
        begin_s += rng.exponential(mean_turns / mix.rate)
        num_left -= len(turns)
        number += 1
        yield Conversation(
            begin_s,
            tuple(
                Turn(
                    np.concatenate([first, _FIRST_TOKEN + (rest ^ key) % (VOCAB_SIZE - _FIRST_TOKEN)]).astype(np.int32),
                    num_output,
                    float(rng.exponential(mix.pause_s)) if mix.pause_s else 0.0,
                )
                for first, rest, num_output in turns
            ),
        )


def _answers(path: Path, number: int, line: object) -> list[tuple[I32, I32, int]]:
    """Per answer: the first message's tokens, the other ones before it, and its length."""
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages
    ):
        raise ConfigError(f'{path}:{number}: expected {{"messages": [{{"role", "content"}}, ..]}}', param="recording")
    found: list[tuple[I32, I32, int]] = []
    first, rest = np.zeros(0, np.int32), np.zeros(0, np.int32)
    for i, message in enumerate(messages):
        tokens = _tokens_of(message["content"])
        if message.get("role") == "assistant" and len(first) + len(rest) and len(tokens):
            found.append((first, rest, len(tokens)))
            first, rest = np.zeros(0, np.int32), np.zeros(0, np.int32)
        elif i == 0:
            first = tokens
        else:
            rest = np.concatenate([rest, tokens])
    return [answer for answer in found if len(answer[0]) + len(answer[1])]


def _tokens_of(text: str) -> I32:
    raw = text.encode()
    raw += b" " * (-len(raw) % _BYTES_PER_TOKEN)
    found: I32 = (_FIRST_TOKEN + np.frombuffer(raw, np.uint32) % (VOCAB_SIZE - _FIRST_TOKEN)).astype(np.int32)
    return found


def traced(path: Path, seed: int) -> Iterator[Conversation]:
    """Yield the conversations of a trace file: one JSON object a line, a request each, in the order of their times.

        {"time_s": 0.5, "conversation": "a", "prompt_tokens": 800, "output_tokens": 120, "shared": "s",
         "shared_tokens": 300}

    A conversation's prompt goes on where its last answer ended. The first `shared_tokens` tokens of the first are those
    of all that name the same `shared` text; both may be left out.

    Raises:
        ConfigError: it is not readable, or a line is no such object; the field is named.
    """
    shared: dict[str, I32] = {}
    turns: dict[str, list[Turn]] = {}
    lengths: dict[str, int] = {}
    rng = np.random.default_rng(seed)
    for number, line in _lines(path):
        entry = line if isinstance(line, dict) else {}
        where = f"{path}:{number}"
        due_s = _number(where, entry, "time_s", 0.0)
        prompt = int(_number(where, entry, "prompt_tokens", 1))
        output = int(_number(where, entry, "output_tokens", 1))
        common = int(_number(where, entry, "shared_tokens", 0, missing=0))
        name = str(entry.get("conversation", number))
        added = _text(rng, max(prompt - lengths.get(name, 0), 1))
        if name not in turns and common:
            text_name = str(entry.get("shared", ""))
            if text_name not in shared:
                shared[text_name] = _text(np.random.default_rng((seed, len(shared))), MAX_MODEL_LEN)
            added[:common] = shared[text_name][: min(common, len(added))]
        turns.setdefault(name, []).append(Turn(added, output, due_s=due_s))
        lengths[name] = lengths.get(name, 0) + len(added) + output
    yield from sorted(
        (Conversation(of[0].due_s, tuple(of)) for of in turns.values()), key=lambda conversation: conversation.begin_s
    )


def _lines(path: Path) -> Iterator[tuple[int, object]]:
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield number, json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a readable file of JSON lines, got {error}") from None


def _number(where: str, entry: dict[str, object], name: str, least: float, missing: float | None = None) -> float:
    value = entry.get(name, missing)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{where}: {name}: expected a number of at least {least:g}, got {value!r:.80}", param=name)
    return value


def _text(rng: np.random.Generator, count: int) -> I32:
    return rng.integers(_FIRST_TOKEN, VOCAB_SIZE, count, np.int32)


def _length(rng: np.random.Generator, median: int) -> int:
    return max(int(median * math.exp(rng.normal(0.0, _SPREAD))), 1)
