"""Prompts that end inside the last message, or right after it."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, TokenizeBody
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.chat_template import ChatTemplate, Message, PromptEnd
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.template_process import TemplateProcess
from tests.unit.entrypoints.test_request_bodies import parse, refusal
from tests.unit.text.test_chat_template import CHATML, CONTROL, control_ids
from tests.unit.text.vocabularies import golden_tokenizer

TOKENIZER = golden_tokenizer()
ENCODER = PromptEncoder(TOKENIZER)
KEEPS = CHATML.replace(" | trim", "")
# As published templates write the last answer: its thinking, empty if there is none, then the text without it.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


def rendered(source: str, last: str, end: PromptEnd, kind: Any = ChatTemplate) -> str:
    segments = kind(source, {}, CONTROL).render([Message("user", "hi"), Message("assistant", last)], {}, None, (), end)
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize("kind", [ChatTemplate, TemplateProcess])
@pytest.mark.parametrize(
    ("source", "last", "expected"),
    [
        (KEEPS, "{\n", "assistant\n{\n"),
        (KEEPS, "so ", "assistant\nso "),
        (KEEPS, "", "assistant\n"),
        (CHATML, " so ", "assistant\nso"),
        (THINKS, "so ", "assistant\n<think>\n\n</think>\n\nso "),
        (KEEPS, "a<|im_end|>b<|im", "assistant\na<|im_end|>b<|im"),
    ],
)
def test_the_prompt_ends_with_the_last_text(kind: Any, source: str, last: str, expected: str) -> None:
    prompt = rendered(source, last, PromptEnd.CONTINUED, kind)
    assert prompt == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>{expected}"


def test_marks_in_the_text_to_continue_are_text() -> None:
    turns = [Message("user", "hi"), Message("assistant", "a<|im_end|>\n<|im_start|>b<|im_")]
    token_ids = ENCODER.encode_chat(turns, {}, end=PromptEnd.CONTINUED)
    assert control_ids(token_ids) == [1, 2, 1]
    assert TOKENIZER.decode(token_ids, skip_hidden=False).endswith("a<|im_end|>\n<|im_start|>b<|im_")


def test_without_a_generation_prompt_the_last_turn_is_closed() -> None:
    assert rendered(KEEPS, "so", PromptEnd.PLAIN).endswith("<|im_start|>assistant\nso<|im_end|>\n")


def test_a_template_that_leaves_the_last_text_out_is_told_of() -> None:
    with pytest.raises(BadRequest, match="writes the last message, got one that leaves it out") as caught:
        rendered("{{ messages[0].content }}", "so", PromptEnd.CONTINUED)
    assert caught.value.param == "continue_final_message"


HELLO: dict[str, Any] = {"role": "user", "content": "hi"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "so"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("body_type", [ChatCompletionBody, TokenizeBody])
@pytest.mark.parametrize(
    ("messages", "fields", "error"),
    [
        ([HELLO], {}, "expected a last message that is the assistant's text, got one of the role 'user'"),
        ([HELLO, {**BEGUN, "tool_calls": [CALL]}], {}, "got one with tool calls"),
        ([HELLO, BEGUN], {"add_generation_prompt": True}, "add_generation_prompt: expected false with continue_final"),
    ],
)
def test_contradictions(body_type: Any, messages: list[Any], fields: dict[str, Any], error: str) -> None:
    assert error in str(refusal(body_type, {"messages": messages, "continue_final_message": True, **fields}))


@pytest.mark.parametrize("raw", [{"prompt_token_ids": [1], "messages": []}, {"disable_chat_template": True}])
def test_a_raw_prompt_has_no_message_to_continue(raw: dict[str, Any]) -> None:
    body = {"messages": [BEGUN], "continue_final_message": True, **raw}
    assert "assistant's text, got none" in str(refusal(ChatCompletionBody, body))


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, PromptEnd.TURN),
        ({"add_generation_prompt": True, "continue_final_message": False}, PromptEnd.TURN),
        ({"add_generation_prompt": False}, PromptEnd.PLAIN),
        ({"continue_final_message": True}, PromptEnd.CONTINUED),
        ({"continue_final_message": True, "add_generation_prompt": False}, PromptEnd.CONTINUED),
    ],
)
def test_the_two_fields_together(fields: dict[str, Any], end: PromptEnd) -> None:
    assert parse(ChatCompletionBody, {"messages": [HELLO, BEGUN], **fields}).prompt_end is end
