"""What an answer says, whichever way it came: whole, as a stream in any number of events, or cut off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    """One choice.

    Attributes:
        logprobs: lists of any names, joined.
        ends: finish_reason and stop_reason, once.
        calls: name and arguments of each tool call; their ids are not kept.
        num_preemptions: how often it was preempted, where `collect_metrics` asked for that; not compared.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    ends: list[Any] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    num_preemptions: int = field(default=0, compare=False)

    def take(self, said: Mapping[str, Any]) -> None:
        """Add what an event, or the whole answer, says of it."""
        inner = said.get("message") or said.get("delta") or said
        self.text += inner.get("text") or inner.get("content") or ""
        self.token_ids += said.get("completion_token_ids") or inner.get("completion_token_ids") or []
        for name, entries in (said.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(entries or [])
        for number, call in enumerate(inner.get("tool_calls") or []):
            self._take_call(call.get("index", number), call["function"])
        self.num_preemptions += (said.get("metrics") or {}).get("num_preemptions", 0)
        if said.get("finish_reason") is not None:
            self.ends += [said["finish_reason"], said.get("stop_reason")]

    def _take_call(self, index: int, function: Mapping[str, str]) -> None:
        """Add a tool call, or a part of its arguments; only the first part has the name."""
        if index == len(self.calls):
            self.calls.append([function["name"], ""])
        self.calls[index][1] += function.get("arguments", "")

    def begins(self, whole: Choice) -> bool:
        """Whether this is a beginning of another one, all of it included."""
        logprobs = all(whole.logprobs.get(name, [])[: len(own)] == own for name, own in self.logprobs.items())
        tokens = whole.token_ids[: len(self.token_ids)] == self.token_ids
        return whole.text.startswith(self.text) and tokens and logprobs and (not self.ends or self == whole)


@dataclass
class Answer:
    """What a client has got.

    Attributes:
        usage: prompt and completion tokens, once they were told.
        error: of the body or the stream.
        is_done: nothing is missing: a whole answer, or a stream up to [DONE].
        broken: how the connection broke, "" = it did not.
    """

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_done: bool = False
    broken: str = ""

    def take(self, value: Mapping[str, Any]) -> None:
        """Add an event, or the whole answer."""
        self.error = value.get("error", self.error)
        for said in value.get("choices", []):
            self.choices.setdefault(said["index"], Choice()).take(said)
        if value.get("usage"):
            self.usage = [value["usage"]["prompt_tokens"], value["usage"]["completion_tokens"]]

    def take_line(self, line: str) -> None:
        """Add a line of a stream."""
        assert not self.is_done or not line, f"behind the end: {line}"
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            self.take(json.loads(line.removeprefix("data: ")))

    @property
    def is_right(self) -> bool:
        """Whether it is complete and no error."""
        return self.status == 200 and self.is_done and self.error is None and not self.broken

    def begins(self, whole: Answer) -> bool:
        """Whether nothing in it differs from another one, as far as it goes."""
        return all(i in whole.choices and choice.begins(whole.choices[i]) for i, choice in self.choices.items())
