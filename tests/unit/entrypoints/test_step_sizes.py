"""The promise as a client sees it: how many tokens a step brought is nowhere in the response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import FinishReason, SpeculationInfo
from tests.unit.entrypoints.scripted_app import CHAT, COMPLETION, EOS, METRICS, Script, ScriptedApp
from tests.unit.text.vocabularies import golden_tokenizer

pytestmark = pytest.mark.slow

TEXT = "def f(x):\n    return x\n\ndef g(y):\n    return \u20ac\U0001f680 y"
TOKENS = golden_tokenizer().encode(TEXT, add_special_tokens=False)
APP = ScriptedApp()
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
    COMPLETION: {"prompt": "x", "logprobs": 2, "echo": False},
}
CHOICE = st.tuples(
    st.integers(2, len(TOKENS)),
    st.sets(st.integers(1, len(TOKENS) - 1)),
    st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)


def script_of(num_tokens: int, cuts: set[int], reason: FinishReason) -> Script:
    """The first tokens of TEXT, then EOS if that is the reason, in steps that begin at the cuts."""
    tokens = TOKENS[:num_tokens] + ([EOS] if reason is FinishReason.STOP else [])
    borders = [0, *sorted(c for c in cuts if c < len(tokens)), len(tokens)]
    return Script([tokens[a:b] for a, b in pairwise(borders)], reason)


def one_by_one(script: Script) -> Script:
    return Script([[token_id] for step in script.steps for token_id in step], script.reason)


def body(path: str, choices: Sequence[Any], **options: Any) -> dict[str, Any]:
    return ASK[path] | {"request_id": "r", "n": len(choices), "seed": 1, "return_token_ids": True} | options


def whole(path: str, ask: dict[str, Any], scripts: Sequence[Script]) -> dict[str, Any]:
    """A successful answer without the time it was made."""
    response = APP.post(path, ask, scripts)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    del answer["created"]
    return answer


def assemble(path: str, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream spells out, chunk by chunk."""
    if path == CHAT:
        verify_ends(chunks[:-1])
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        [part] = chunk["choices"]
        known = choices.setdefault(part["index"], {})
        assert known.get("finish_reason") is None, "a chunk after the last one"
        part = {("message" if key == "delta" else key): value for key, value in part.items()}
        _extend(known, part)
    return {
        "id": chunks[0]["id"],
        "object": "chat.completion" if path == CHAT else "text_completion",
        "model": chunks[0]["model"],
        "choices": [choices[i] for i in sorted(choices)],
        "usage": chunks[-1]["usage"],
        **{key: chunks[0][key] for key in ("prompt_token_ids",) if key in chunks[0]},
    }


def verify_ends(chunks: list[dict[str, Any]]) -> None:
    """As OpenAI's: the first chunk of a choice has the role and nothing that was said, the last how it ended."""
    for index in {part["index"] for chunk in chunks for part in chunk["choices"]}:
        first, *between, last = (part for chunk in chunks for part in chunk["choices"] if part["index"] == index)
        assert first["delta"] | {"prompt_token_ids": 0} == {"role": "assistant", "content": "", "prompt_token_ids": 0}
        assert last["delta"] == {}
        assert (first["logprobs"], last["logprobs"]) == (None, None)
        for part in (first, *between):
            assert part["finish_reason"] is part["stop_reason"] is None
        assert all(part["delta"] and "role" not in part["delta"] for part in between)


def _extend(known: dict[str, Any], part: dict[str, Any]) -> None:
    """Text and lists grow, in objects too; whatever else comes is new."""
    for key, value in part.items():
        before = known.get(key)
        if before is None or isinstance(before, int):
            known[key] = value
        elif isinstance(value, dict):
            _extend(before, value)
        elif value is not None:
            known[key] = before + value


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(CHOICE, min_size=1, max_size=3),
    stop=st.sampled_from([[], ["return"], ["n x"], [":\n    ret", "zzz"], ["\u20ac", ")"], ["y"]]),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_neither_answers_nor_streams_depend_on_the_steps(
    path: str, choices: list[Any], stop: list[str], include: bool, min_tokens: int
) -> None:
    options = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    ask = body(path, choices, **options)
    scripts = [script_of(*choice) for choice in choices]
    answer = whole(path, ask, scripts)
    assert answer == whole(path, ask, [one_by_one(script) for script in scripts])
    for steps in (scripts, [one_by_one(script) for script in scripts]):
        assert assemble(path, APP.chunks(path, ask, steps)) == answer


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(CHOICE, min_size=1, max_size=2),
    stop=st.sampled_from([[], ["return"], ["\u20ac", ")"]]),
)
def test_the_drafts_of_a_stream_add_up_to_those_of_the_answer(path: str, choices: list[Any], stop: list[str]) -> None:
    ask = body(path, choices, include_draft_logprobs=True, stop=stop)
    scripts = [script_of(*choice) for choice in choices]
    answer = whole(path, ask, scripts)
    assert assemble(path, APP.chunks(path, ask, scripts)) == answer
    without = whole(path, ask | {"include_draft_logprobs": False}, scripts)
    for choice in answer["choices"]:
        assert choice.pop("draft_logprobs") is not None
    assert answer == without, "asking for drafts changes nothing else"


def test_drafts_behind_a_stop_string_are_cut_with_their_tokens() -> None:
    end = next(i for i in range(len(TOKENS)) if "return" in golden_tokenizer().decode(TOKENS[:i], skip_hidden=True))
    script = Script([TOKENS[:2], TOKENS[2:]])
    for path in (CHAT, COMPLETION):
        [choice] = whole(path, body(path, [0], include_draft_logprobs=True, stop="return"), [script])["choices"]
        drafts, tokens = choice["draft_logprobs"], choice["logprobs"]
        if path == CHAT:
            assert [e["token"] for e in drafts["content"][3:]] == [e["token"] for e in tokens["content"][2:]]
            positions = [e["position"] for e in drafts["content"]]
            accepted = [e["accepted"] for e in drafts["content"]]
            assert all(len(e["top_logprobs"]) == 2 for e in drafts["content"])
        else:
            assert drafts["tokens"][3:] == tokens["tokens"][2:]
            assert drafts["text_offset"][:2] == tokens["text_offset"][:2]
            assert drafts["text_offset"][2] == tokens["text_offset"][2], "behind the first step's tokens"
            assert drafts["text_offset"][3:] == tokens["text_offset"][2:]
            positions, accepted = drafts["position"], drafts["accepted"]
        assert positions == [0, 1, 2, *range(end - 2)]
        assert accepted == [True, False, False, *[True] * (end - 2)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_reports_what_the_engine_measured(stream: bool) -> None:
    script = Script([TOKENS[:-2], TOKENS[-2:]])
    ask = body(COMPLETION, [0], stop="return", collect_metrics=True)
    if stream:
        choice = APP.chunks(COMPLETION, ask, [script])[-2]["choices"][0]
    else:
        [choice] = whole(COMPLETION, ask, [script])["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["metrics"]["first_scheduled_time"] == METRICS.first_scheduled_time
    assert choice["speculate_metrics"]["accepted_tokens"] == 6


def test_nobody_waits_for_figures_that_are_not_shown() -> None:
    script = Script([TOKENS[:-2], TOKENS[-2:]])
    app = ScriptedApp(SpeculationInfo())
    for collect_metrics in (False, True):
        [choice] = app.post(
            COMPLETION, body(COMPLETION, [0], stop="return", collect_metrics=collect_metrics), [script]
        ).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert set(app.client.aborted.values()) == {FinishReason.STOP}
        assert bool(app.client.awaited) is collect_metrics


def test_an_engine_that_fails_behind_a_stop_string_does_not_spoil_the_answer() -> None:
    script = Script([TOKENS[:-2], TOKENS[-2:]])
    ask = body(COMPLETION, [0], stop="return")
    right = whole(COMPLETION, ask, [script])
    APP.client.error = InternalError("non-finite logits")
    try:
        answer = whole(COMPLETION, ask, [script])
    finally:
        APP.client.error = None
    assert answer["choices"][0].pop("speculate_metrics")["accepted_tokens"] == 0
    assert right["choices"][0].pop("speculate_metrics")["accepted_tokens"] == 6
    assert answer == right
