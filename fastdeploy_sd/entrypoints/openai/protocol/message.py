"""A turn of a conversation as clients send it: OpenAI's fields, and what their own second turns carry along.

Clients send back what a server gave them (`annotations`, `parsed`, `provider_specific_fields`, ...), so a turn may hold
names that mean nothing here. They are ignored, as by other servers, and logged once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import ConfigDict, model_validator

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, FieldKind, expected, fault, tell_ignored
from fastdeploy_sd.text.call_arguments import holds_all
from fastdeploy_sd.text.chat_template import ROLES, Message, PromptEnd

MAX_MESSAGES = 8192
MAX_TOOL_CALLS = 128
_MAX_NAMES_TOLD = 16
# Type of a part of the content -> the key of its text.
_TEXT_KEYS = {"text": "text", "refusal": "refusal"}
# OpenAI's older name of a role.
_RENAMED = {"function": "tool"}
# Other names are roles that a chat template may know.
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ROLE_SCHEMA = {"type": "string", "pattern": f"^{_ROLE.pattern}$"}
_FUNCTION = '{"name": ..., "arguments": ...}'
_FUNCTION_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
    "required": ["name"],
}
_CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"enum": ["function", None]},
        "function": _FUNCTION_SCHEMA,
    },
    "required": ["function"],
}
_CALLS_SCHEMA = {"type": "array", "maxItems": MAX_TOOL_CALLS, "items": _CALL_SCHEMA}


def content_schema(text_keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of what `content_text` takes."""
    parts = [
        {"type": "object", "properties": {"type": {"const": kind}, key: {"type": "string"}}, "required": ["type", key]}
        for kind, key in text_keys.items()
    ]
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}}]}


def content_text(value: Any, text_keys: Mapping[str, str], expected_names: Collection[str] = ()) -> str | None:
    """Return the text of a content: it itself, or its parts joined by line breaks; None when it is neither.

    `expected_names`: what else a part has that means nothing here; of other names the log is told.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    texts = [_part_text(part, text_keys, expected_names) for part in value]
    return None if None in texts else "\n".join(text for text in texts if text is not None)


def _part_text(part: Any, text_keys: Mapping[str, str], expected_names: Collection[str]) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    key = text_keys.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(part.get(key), str):
        return None
    tell_names("part of a message's content", part, ("type", key, *expected_names))
    return str(part[key])


class _Role(FieldKind):
    schema = _ROLE_SCHEMA
    takes_null = False

    def convert(self, value: Any) -> str:
        if not isinstance(value, str) or not _ROLE.fullmatch(value):
            known = ", ".join((*ROLES, *_RENAMED))
            raise expected(f"one of {known}, or a role that the model's chat template knows (letters, digits and _.-)")
        return _RENAMED.get(value, value)


class _Content(FieldKind):
    """Text, or a list of text parts, which are joined by line breaks."""

    schema = content_schema(_TEXT_KEYS)

    def convert(self, value: Any) -> str:
        text = content_text(value, _TEXT_KEYS)
        if text is None:
            what = 'text or a list of {"type": "text", "text": ...} parts (images and audio are not supported)'
            raise expected(what)
        return text


class _ToolCalls(FieldKind):
    """Calls that the assistant made in earlier turns, with what a chat template reads of them."""

    schema = _CALLS_SCHEMA

    def convert(self, value: Any) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or len(value) > MAX_TOOL_CALLS:
            raise expected(f"a list of at most {MAX_TOOL_CALLS} calls")
        return tuple(map(self._call, value))

    @staticmethod
    def _call(value: Any) -> dict[str, Any]:
        call = value if isinstance(value, dict) else {}
        call_id = call.get("id")
        if call.get("type") not in ("function", None) or not isinstance(call_id, str | None):
            raise expected(f'calls of the form {{"id": ..., "type": "function", "function": {_FUNCTION}}}')
        return {**({} if call_id is None else {"id": call_id}), **_called(call.get("function"))}


class _FunctionCall(FieldKind):
    """OpenAI's older name of a single tool call, without an id."""

    schema = _FUNCTION_SCHEMA

    def convert(self, value: Any) -> dict[str, Any]:
        return _called(value)


def _called(function: Any) -> dict[str, Any]:
    given = function if isinstance(function, dict) else {}
    name, arguments = given.get("name"), given.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str | dict | None):
        raise expected(f"a function of the form {_FUNCTION}")
    if not holds_all(arguments):
        raise expected("arguments as text where they have a number beyond 1.8e308, which then keeps its digits")
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}


class ChatMessage(Body):
    """One turn of a conversation.

    Attributes:
        role: developer is the same as system, function the same as tool; others are the chat template's.
        content: None only in a turn of the assistant, which may consist of tool calls.
        tool_calls, function_call: what the assistant called; the second is OpenAI's older name for a single one.
        tool_call_id: which of the calls a turn of a tool answers.
        reasoning_content: what the assistant thought before its answer, for templates that show it again.
        reasoning: the same under another name, as this server's own answers have it; anything but text is left aside.
    """

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, _Role()]
    content: Annotated[str | None, _Content()] = None
    name: str | None = None
    tool_calls: Annotated[tuple[dict[str, Any], ...] | None, _ToolCalls()] = None
    function_call: Annotated[dict[str, Any] | None, _FunctionCall()] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None

    @model_validator(mode="before")
    @classmethod
    def _tell_ignored(cls, value: Any) -> Any:
        if isinstance(value, dict):
            tell_names("message", value, cls.model_fields)
        return value

    @property
    def calls(self) -> tuple[dict[str, Any], ...]:
        """What the assistant called, under either name."""
        return self.tool_calls or (() if self.function_call is None else (self.function_call,))

    def as_turn(self) -> Message:
        """Return the turn as the chat template gets it."""
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if not isinstance(thought, str):
            thought = None
        return Message(self.role, self.content or "", self.name, self.calls, self.tool_call_id, thought)

    @model_validator(mode="after")
    def _verify_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise fault(
                "below", f"content: expected text (only an assistant's may be null), got none in a {self.role}'s"
            )
        return self


def tell_names(where: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    """Tell the log which names of an object are left aside."""
    for name in islice((n for n, v in value.items() if v is not None and n not in known), _MAX_NAMES_TOLD):
        tell_ignored(where, name)


_CONTINUE = "continue_final_message"


class PromptEndFields(Body):
    """Where the prompt of a conversation ends.

    Attributes:
        add_generation_prompt: false = after the last message, with nothing that begins the assistant's turn.
        continue_final_message: true = inside the last message, which is the assistant's, so that the model goes on
            with it; then add_generation_prompt is false by itself.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def prompt_end(self) -> PromptEnd:
        """What the two fields say together."""
        if self.continue_final_message:
            return PromptEnd.CONTINUED
        return PromptEnd.PLAIN if self.add_generation_prompt is False else PromptEnd.TURN


def prompt_end_faults(fields: PromptEndFields, messages: list[ChatMessage]) -> list[Fault]:
    """Return what contradicts the last message, or one another. `messages` is empty where the prompt is raw."""
    if not fields.continue_final_message:
        return []
    if fields.add_generation_prompt:
        name = "add_generation_prompt"
        return [Fault(f"{name}: expected false with {_CONTINUE}, got true", name)]
    got = "none" if not messages else f"one of the role {messages[-1].role!r}"
    if messages and messages[-1].role == "assistant":
        if not messages[-1].calls:
            return []
        got = "one with tool calls"
    return [Fault(f"{_CONTINUE}: expected a last message that is the assistant's text, got {got}", _CONTINUE)]
