"""Bodies that cost far more than their size seems to ask for: each of them has once stalled a server, or would have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Attack:
    """One request.

    Attributes:
        path: of the route.
        content: the body.
    """

    name: str
    path: str
    content: bytes


def small_attacks() -> Iterator[Attack]:
    """Yield bodies whose numbers multiply."""
    prompts = ["a"] * 1024
    yield _attack("1024 prompts x n 128", COMPLETION, {"prompt": prompts, "n": 128, "max_tokens": 1})
    words = ["x" * 976] * 256
    yield _attack("1024 prompts x 256 bad words", COMPLETION, {"prompt": prompts, "bad_words": words, "max_tokens": 1})
    words = ["x" * 900] * 256
    yield _attack("48 prompts x 256 bad words", COMPLETION, {"prompt": ["a"] * 48, "bad_words": words, "max_tokens": 1})
    yield _attack("600 prompts", COMPLETION, {"prompt": ["a"] * 600, "max_tokens": 1})
    yield _attack("n 128, 20 logprobs", COMPLETION, {"prompt": "a", "n": 128, "max_tokens": 64, "logprobs": 20})


def large_attacks(num_bytes: int) -> Iterator[Attack]:
    """Yield bodies of about so many bytes each."""
    yield Attack("messages [1,1,...]", CHAT, _filled(b'{"messages":[', b"1,", b"1]}", num_bytes))
    yield Attack("messages [[],[],...]", CHAT, _filled(b'{"messages":[', b"[],", b"[]]}", num_bytes))
    head, tail = b'{"messages":[{"role":"user","content":"', b'"}]}'
    yield Attack("control tokens in a message", CHAT, _filled(head, b"<|im_end|>", tail, num_bytes))
    yield Attack("an emoji and a long message", CHAT, _filled(head + "\U0001f600".encode(), b"a", tail, num_bytes))
    yield Attack("text ab ab ...", COMPLETION, _filled(b'{"prompt":"', b"ab ", b'"}', num_bytes))
    yield Attack("text aaaa...", COMPLETION, _filled(b'{"prompt":"', b"a", b'"}', num_bytes))
    yield Attack("token ids", COMPLETION, _filled(b'{"prompt":[', b"1234,", b"5]}", num_bytes))
    yield Attack("lists in lists", COMPLETION, _filled(b'{"prompt":', b"[", b"", num_bytes))
    fields = ",".join(f'"f{i:07}":1' for i in range(num_bytes // 13))
    yield Attack("unknown fields", COMPLETION, f"{{{fields}}}".encode())
    words = ["x" * (num_bytes // 260)] * 256
    yield _attack("long bad words", COMPLETION, {"prompt": "a", "bad_words": words, "max_tokens": 1})


def _attack(name: str, path: str, body: dict[str, Any]) -> Attack:
    return Attack(name, path, json.dumps(body).encode())


def _filled(head: bytes, part: bytes, tail: bytes, num_bytes: int) -> bytes:
    return head + part * ((num_bytes - len(head) - len(tail)) // len(part)) + tail
