"""What the model thinks stands apart in answers: whole, streamed, gone on with elsewhere, and counted in tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cluster.route import ChoiceProgress, Progress
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.entrypoints.openai.choice_format import ChatFormat
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.job_builder import JobBuilder
from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, ResponseBody, parse_body
from fastdeploy_sd.entrypoints.openai.response_format import ResponseFormat
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.output_processor import OutputProcessor
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.types import FinishReason, RequestOutput
from tests.unit.entrypoints.scripted_app import CHAT, COMPLETION, INFO, Script, ScriptedApp
from tests.unit.text.vocabularies import GOLDEN, golden_tokenizer

RESPONSES = "/v1/responses"
TOKENIZER = golden_tokenizer()
TEXT = "<think>\nOne, two.\n</think>\n\nThree <think>!"
THOUGHT, SAID = "One, two.", "Three <think>!"
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False)
# The model speaks in bytes, so the thinking has as many tokens as its text has pieces.
NUM_THOUGHT = next(n for n in range(len(TOKENS)) if TOKENIZER.decode(TOKENS[:n], skip_hidden=True).endswith("</think>"))
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}]}
INSIDE_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count.\nAssistant: <think>\n"}],
    "disable_chat_template": True,
}


@pytest.fixture(scope="module")
def app() -> ScriptedApp:
    return ScriptedApp(reasoning_parser="qwen3")


def script(tokens: list[int], step: int, reason: FinishReason = FinishReason.STOP) -> list[Script]:
    """The tokens in steps of a size, and the EOS where the model ends by itself."""
    whole = [*tokens, 2] if reason is FinishReason.STOP else tokens
    return [Script([whole[i : i + step] for i in range(0, len(whole), step)], reason)]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_chat_completion_has_reasoning_and_content(app: ScriptedApp, step: int) -> None:
    answer = app.post(CHAT, BODY, script(TOKENS, step)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (THOUGHT, THOUGHT, SAID)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_THOUGHT

    chunks = app.chunks(CHAT, BODY, script(TOKENS, step))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == SAID
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_THOUGHT


def test_an_answer_that_begins_inside_the_thinking(app: ScriptedApp) -> None:
    tokens = TOKENIZER.encode("One.\n</think>\nTwo.", add_special_tokens=False)
    message = app.post(CHAT, INSIDE_BODY, script(tokens, 2)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("One.", "Two.")


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_what_goes_on_with_an_answer_is_content(parser: str) -> None:
    begun = [*BODY["messages"], {"role": "assistant", "content": "One "}]
    body = {"messages": begun, "continue_final_message": True}
    message = ScriptedApp(reasoning_parser=parser).post(CHAT, body, script(TOKENS, 2)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT}


def test_thinking_that_a_limit_cuts_off_stays_thinking(app: ScriptedApp) -> None:
    tokens = TOKENIZER.encode("One, two", add_special_tokens=False)
    answer = app.post(CHAT, INSIDE_BODY, script(tokens, 1, FinishReason.LENGTH)).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "One, two"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("fields", "thought", "said"),
    [
        ({"include_reasoning": False}, None, SAID),
        ({"separate_reasoning": False}, None, TEXT),
        ({"stream_reasoning": False}, THOUGHT, SAID),
        ({"include_reasoning": True, "separate_reasoning": True, "stream_reasoning": True}, THOUGHT, SAID),
    ],
)
def test_how_reasoning_is_shown_is_the_requests_choice(
    app: ScriptedApp, fields: dict[str, Any], thought: str | None, said: str
) -> None:
    message = app.post(CHAT, BODY | fields, script(TOKENS, 3)).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, said)
    deltas = [chunk["choices"][0]["delta"] for chunk in app.chunks(CHAT, BODY | fields, script(TOKENS, 3))[:-1]]
    thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(thoughts) == (thought or "")
    assert "".join(delta.get("content", "") for delta in deltas) == said
    if fields == {"stream_reasoning": False}:
        assert thoughts == [THOUGHT]


def test_nothing_is_split_without_a_format_nor_in_text_completions() -> None:
    plain = ScriptedApp(reasoning_parser="auto")  # the checkpoint's chat template has no marks
    answer = plain.post(CHAT, BODY, script(TOKENS, 3)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
    assert "completion_tokens_details" not in answer["usage"]
    answer = ScriptedApp(reasoning_parser="qwen3").post(COMPLETION, {"prompt": "Count."}, script(TOKENS, 3)).json()
    assert answer["choices"][0]["text"] == TEXT


def test_a_response_has_an_item_for_the_reasoning(app: ScriptedApp) -> None:
    whole = app.post(RESPONSES, {"input": "Count."}, script(TOKENS, 3)).json()
    thought, message = whole["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert (message["type"], message["content"][0]["text"]) == ("message", SAID)
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}

    text = app.post(RESPONSES, {"input": "Count.", "stream": True}, script(TOKENS, 3)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events if event.get("output_index") == 0]
    assert list(dict.fromkeys(names)) == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    shown = [{**item, "id": ""} for item in events[-1]["response"]["output"]]
    assert shown == [{**item, "id": ""} for item in whole["output"]]


def test_the_next_turn_brings_the_reasoning_to_the_template() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "Hi."}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    question = {"role": "user", "content": "Go on."}

    def turns(*items: dict[str, Any]) -> list[tuple[str, str, str | None]]:
        body = parse_body(ResponseBody, json.dumps({"input": [*items, question]}).encode())
        return [(turn.role, turn.content, turn.reasoning_content) for turn in body.turns]

    asked = ("user", "Go on.", None)
    assert turns(thought, said) == [("assistant", "Hi.", "Hm."), asked]
    assert turns(thought, call) == [("assistant", "", "Hm."), asked]
    assert turns(thought) == [asked]
    assert turns({"type": "reasoning", "summary": []}, said) == [("assistant", "Hi.", None), asked]

    message: dict[str, Any]
    for message, expected in (
        (said | {"reasoning": "Hm."}, "Hm."),
        (said | {"reasoning": "x", "reasoning_content": "Hm."}, "Hm."),
        (said | {"reasoning": {"effort": "low"}}, None),
    ):
        chat = parse_body(ChatCompletionBody, json.dumps({"messages": [message, question]}).encode())
        assert chat.messages[0].as_turn().reasoning_content == expected


def test_an_answer_names_the_service_tier_when_its_request_does(app: ScriptedApp) -> None:
    for path, body in ((CHAT, BODY), (COMPLETION, {"prompt": "x"})):
        assert app.post(path, body | {"service_tier": "flex"}, script([300], 1)).json()["service_tier"] == "default"
        chunks = app.chunks(path, body | {"service_tier": "auto"}, script([300], 1))
        assert {chunk["service_tier"] for chunk in chunks} == {"default"}
        assert "service_tier" not in app.post(path, body, script([300], 1)).json()


def test_a_stream_that_goes_on_elsewhere_shows_and_counts_the_same() -> None:
    config = Config(model=ModelConfig(model=str(GOLDEN), reasoning_parser="qwen3"))
    builder = JobBuilder(PromptEncoder(TOKENIZER), INFO, config, GrammarChecker.of(TOKENIZER).verify)
    chat = builder.build_chat(parse_body(ChatCompletionBody, json.dumps(BODY | {"stream": True}).encode()))
    response = builder.build_response(parse_body(ResponseBody, json.dumps({"input": "x", "stream": True}).encode()))
    expected = _shown_chat(chat, TOKENS), _shown_response(response, TOKENS)
    assert expected[0][0] == (THOUGHT, SAID)
    for num_shown in range(1, len(TOKENS)):
        first, rest = TOKENS[:num_shown], TOKENS[num_shown:]
        (thought, said), _ = _shown_chat(chat, first, is_last=False)
        (more_thought, more_said), count = _shown_chat(_resumed(chat, first), rest)
        assert ((thought + more_thought, said + more_said), count) == expected[0], num_shown
        resumed = _resumed(response, first, _shown_response(response, first, is_last=False)[2])
        assert _shown_response(resumed, rest)[:2] == expected[1][:2], num_shown


def _resumed(job: GenerationJob, tokens: list[int], num_events: int = 0) -> GenerationJob:
    progress = Progress(
        job.job_id, job.created, job.requests.seeds, (ChoiceProgress(tuple(tokens)),), False, num_events
    )
    resumed = job.routed(None, progress)
    assert np.array_equal(resumed.requests[0].output_token_ids, tokens)
    return resumed


def _deltas(job: GenerationJob, tokens: list[int], is_last: bool) -> list[Any]:
    processor = OutputProcessor(job.requests[0], TOKENIZER)
    outputs = [RequestOutput("r", (token,)) for token in tokens]
    if is_last:
        outputs[-1] = replace(outputs[-1], finish_reason=FinishReason.LENGTH)
    return [processor.process(output) for output in outputs]


def _shown_chat(job: GenerationJob, tokens: list[int], is_last: bool = True) -> tuple[tuple[str, str], int]:
    """What a stream says of thinking and content, and the tokens of the thinking in its usage."""
    form = ChatFormat(job, TOKENIZER)
    usage = form.usage_counter()
    thought = said = ""
    for delta in _deltas(job, tokens, is_last):
        usage.add(0, delta)
        part = form.part(0, delta, usage)
        if part is not None:
            events = part.text.split("\n\n")[:-1]
            assert len(events) == part.num_events
            for event in events:
                shown = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
                thought, said = thought + shown.get("reasoning_content", ""), said + shown.get("content", "")
    return (thought, said), usage.num_reasoning_tokens


def _shown_response(job: GenerationJob, tokens: list[int], is_last: bool = True) -> tuple[Any, int, int]:
    """The items of a stream's last event, the tokens of the thinking, and how many events there were."""
    form = ResponseFormat(job, TOKENIZER)
    usage = form.usage_counter()
    output, num_events = None, 0
    for delta in _deltas(job, tokens, is_last):
        usage.add(0, delta)
        part = form.part(0, delta, usage)
        if part is not None:
            num_events += part.num_events
            if part.is_last:
                output = json.loads(part.text.rpartition("data: ")[2])["response"]["output"]
    return output, usage.num_reasoning_tokens, num_events
