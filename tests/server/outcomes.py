"""Streams of every kind of request to a real model, and what they say, whatever their events are."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx

TIMEOUT_S = 300.0
NUM_TOKENS = 600
MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
EDITED = "def add(first, second):\n    return first + second\n\n\n" * 20
LETTERS: dict[str, Any] = {"guided_regex": "[a-z ]{16000}", "ignore_eos": False}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "def add(a, b):", "temperature": 0, "logprobs": 3}),
    ("/v1/completions", {"prompt": "def add(a, b):", "seed": 7, "temperature": 0.9, "repetition_penalty": 1.1}),
    ("/v1/completions", {"prompt": ["import ", "class A"], "seed": 3, "n": 2, "frequency_penalty": 0.5}),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "seed": 11, "n": 3, "stop": ["return a", "zzzz"], "top_p": 0.9}),
    ("/v1/completions", {"prompt": "Words: ", "seed": 5, "logprobs": 1, **LETTERS}),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": f"Write longer names: {EDITED}"}], "temperature": 0,
        "prediction": {"type": "content", "content": EDITED},
    }),
]  # fmt: skip


def outcome(url: str, path: str, body: dict[str, Any]) -> dict[object, dict[str, list[Any]]]:
    """What a stream says of each choice, whatever its events are: text, log-probabilities, end; and the usage."""
    found: defaultdict[object, defaultdict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    options = {"model": "m", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    text = httpx.post(
        f"{url}{path}", json=options | body | {"stream_options": {"include_usage": True}}, timeout=TIMEOUT_S
    ).text
    for event in text.split("\n\n"):
        if not event.startswith("data: {"):
            continue
        value = json.loads(event.removeprefix("data: "))
        assert "error" not in value, value
        for choice in value["choices"]:
            of_choice = found[choice["index"]]
            of_choice["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for name, entries in (choice["logprobs"] or {}).items():
                of_choice[name] += entries or []
            of_choice["end"] += [choice["finish_reason"], choice["stop_reason"]] if choice["finish_reason"] else []
        if value["usage"]:
            found["usage"]["all"] += [value["usage"]["completion_tokens"], value["usage"]["prompt_tokens"]]
    return {choice: dict(of_choice) for choice, of_choice in found.items()}
