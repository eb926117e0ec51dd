"""Log-probabilities in /v1/responses: those of the tokens of a message's text, in OpenAI's types, however they came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseOutputMessage, ResponseTextDeltaEvent, ResponseTextDoneEvent

from fastdeploy_sd.text.answer_parser import TokenAligner
from fastdeploy_sd.text.answer_parts import AnswerPart, Content, ToolCallDelta
from fastdeploy_sd.types import FinishReason
from tests.unit.entrypoints.scripted_app import CHAT, EOS, Script, ScriptedApp
from tests.unit.text.vocabularies import golden_tokenizer

RESPONSES = "/v1/responses"
TOKENIZER = golden_tokenizer()
APP = ScriptedApp(reasoning_parser="qwen3", tool_call_parser="hermes")
ASK: dict[str, Any] = {
    "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "request_id": "resp_r",
    "tools": [{"type": "function", "name": "get", "parameters": {"type": "object"}}],
}  # fmt: skip
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
PLAIN = "def f(x): <b>\u20ac\U0001f680</b>\n"
# A text, and what its messages say.
TEXTS = [
    (PLAIN, [PLAIN]),
    ("<think>\nOne, two.\n</think>\n\nThree.", ["Three."]),
    (f"Look: {CALL}", ["Look:"]),
    (f"<think>Hm.</think>A <tool_call> is{CALL}", ["A <tool_call> is"]),
]


def script(text: str, cuts: set[int]) -> Script:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    borders = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    return Script([tokens[a:b] for a, b in pairwise(borders)], FinishReason.STOP)


def events_of(text: str, cuts: set[int], **ask: Any) -> list[dict[str, Any]]:
    answer = APP.post(RESPONSES, ASK | ask | {"stream": True}, [script(text, cuts)]).text
    return [json.loads(line.removeprefix("data: ")) for line in answer.split("\n") if line.startswith("data: ")]


def text_of(entries: Sequence[Any]) -> str:
    return bytes(b for entry in entries for b in entry.bytes).decode()


@pytest.mark.parametrize(("text", "said"), TEXTS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 60)), stop=st.sampled_from([[], ["zzz", "f(y)", "Threes", "\U0001f680!"]]))
def test_a_message_has_those_of_its_tokens(text: str, said: list[str], cuts: set[int], stop: list[str]) -> None:
    whole = APP.post(RESPONSES, ASK | {"stop": stop}, [script(text, set(range(99)))]).json()
    response = Response.model_validate(whole, strict=True)
    parts: list[Any] = [item.content[0] for item in response.output if isinstance(item, ResponseOutputMessage)]
    assert [part.text for part in parts] == said
    for part in parts:
        assert part.text in text_of(part.logprobs), "all its tokens"
        shown = [entry for entry in part.logprobs[1:-1] if bytes(entry.bytes).decode(errors="ignore").strip()]
        assert all(bytes(entry.bytes).decode(errors="ignore") in part.text for entry in shown), "and no others"
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert response.top_logprobs == 2

    events = events_of(text, cuts, stop=stop)
    for item in response.output:
        of_item = [event for event in events if event.get("item_id") == item.id]
        deltas = [e for e in of_item if e["type"] == "response.output_text.delta"]
        for event in deltas:
            ResponseTextDeltaEvent.model_validate(event, strict=True)
        told = [entry for event in deltas for entry in event["logprobs"]]
        for event in (e for e in of_item if e["type"] == "response.output_text.done"):
            ResponseTextDoneEvent.model_validate(event, strict=True)
            assert event["logprobs"] == told == [entry.to_dict() for entry in parts[0].logprobs]
        for event in (e for e in of_item if e["type"] == "response.content_part.added"):
            assert event["part"].get("logprobs", []) == []
    times = {"created_at": 0, "usage": None}
    assert events[-1]["response"] | times == whole | times


def test_they_are_those_of_a_chat_completion_and_come_when_asked_for() -> None:
    ask = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    chat = APP.post(CHAT, ask, [script(PLAIN, set())]).json()["choices"][0]["logprobs"]["content"]
    response = APP.post(RESPONSES, ASK, [script(PLAIN, set())]).json()
    assert response["output"][0]["content"][0]["logprobs"] == chat[:-1], "all but what ended the answer"
    without = APP.post(RESPONSES, ASK | {"include": [], "top_logprobs": 0}, [script(PLAIN, set())]).json()
    assert without["output"][0]["content"][0].pop("logprobs") == []
    response["output"][0]["content"][0].pop("logprobs")
    assert response | {"created_at": 0, "top_logprobs": 0, "usage": 0} == without | {"created_at": 0, "usage": 0}


class ByCharacter:
    """Tells each character in a part of its own, holds an x back until another comes, and drops a dot."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for char in text:
            if char == "(":
                parts.append(ToolCallDelta(0, None, char))
            elif char in "x.":
                self._held += char
            else:
                parts.append(Content(self._held.replace(".", "") + char))
                self._held = ""
        return parts

    def finish(self) -> list[AnswerPart]:
        return []


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a", "x", "b"], [("axb", [0, 1, 2])]),
        (["a", "", "b"], [("ab", [0, 1, 2])]),
        (["a", ".", "b", ""], [("ab", [0, 2])]),
        ([".b", "x"], [("b", [0])]),
        (["ax", "b"], [("axb", [0, 1])]),
        (["a", "(", "x", "b"], [("a", [0]), (None, []), ("xb", [2, 3])]),
    ],
)
def test_tokens_of_parts(pieces: list[str], expected: list[tuple[str | None, list[int]]]) -> None:
    offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    parser: Any = ByCharacter()
    at_once = TokenAligner[int](parser)
    told = at_once.push("".join(pieces), range(len(pieces)), offsets)
    assert [(part.text if isinstance(part, Content) else None, tokens) for part, tokens in told] == expected
