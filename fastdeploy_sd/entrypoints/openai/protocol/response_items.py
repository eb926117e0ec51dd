"""`input` of /v1/responses: a text, or the items of a conversation, as turns for the chat template.

Clients send back the items that a server gave them, so an item has an `id`, a `status` and `annotations`, which mean
nothing in a prompt. Other names are left aside and told in the log once, as in messages. What the model thought belongs
to the turn that follows it; without a text, as OpenAI's own servers give it, it is left aside too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import FieldKind, expected, fault, tell_ignored
from fastdeploy_sd.entrypoints.openai.protocol.message import (
    MAX_MESSAGES,
    content_schema,
    content_text,
    tell_names,
)
from fastdeploy_sd.errors import shown
from fastdeploy_sd.text.chat_template import Message

_ROLES = ("system", "developer", "user", "assistant")
# Type of a part of the content -> the key of its text.
_TEXT_KEYS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHT_KEYS = {"reasoning_text": "text"}
# What OpenAI's own items and parts have in addition.
_OF_ITEMS = ("id", "status", "phase")
_OF_PARTS = ("annotations", "logprobs")
_CONTENT = 'text or a list of {"type": "input_text", "text": ...} parts (images, audio and files are not supported)'
_TEXT = {"type": "string"}
_CONTENT_SCHEMA = content_schema(_TEXT_KEYS)


def _schema(item_type: dict[str, Any], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": item_type, **properties}, "required": [*properties]}


def _typed_schema(kind: str, /, **properties: Any) -> dict[str, Any]:
    schema = _schema({"const": kind}, **properties)
    return {**schema, "required": ["type", *properties]}


_ITEM_SCHEMAS = [
    _schema({"enum": ["message", None]}, role={"enum": list(_ROLES)}, content=_CONTENT_SCHEMA),
    _typed_schema("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
    _typed_schema("function_call_output", call_id=_TEXT, output=_CONTENT_SCHEMA),
    {
        "type": "object",
        "properties": {
            "type": {"const": "reasoning"},
            "content": {"anyOf": [content_schema(_THOUGHT_KEYS), {"type": "null"}]},
        },
        "required": ["type"],
    },
]
_INPUT_SCHEMA = {
    "anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _ITEM_SCHEMAS}, "minItems": 1, "maxItems": MAX_MESSAGES}]
}


class Items(FieldKind):
    """A text, which is the user's, or items; the body holds turns."""

    schema = _INPUT_SCHEMA
    takes_null = False

    def convert(self, value: Any) -> tuple[Message, ...]:
        if isinstance(value, str):
            return (Message("user", value),)
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
            raise expected(f"text or a list of 1..{MAX_MESSAGES} items")
        turns: list[Message] = []
        for i, item in enumerate(value):
            _add_item(turns, _Item(item, f"[{i}]"))
        return tuple(turn for turn in turns if not _is_only_thought(turn))


class _Item:
    """An item of the list, which reads its fields and says which one is wrong."""

    def __init__(self, value: Any, path: str) -> None:
        self._path = path
        if not isinstance(value, dict):
            raise self.fault("", f"an item, one of {', '.join(_READERS)}", value)
        self._value: Mapping[str, Any] = value
        self.type = value.get("type") or "message"

    def fault(self, name: str, what: str, got: object) -> Exception:
        return fault("inside", f"{self._path}{name and '.' + name}: expected {what}, got {shown(got)}")

    def text(self, name: str) -> str:
        value = self._value.get(name)
        if not isinstance(value, str):
            raise self.fault(name, "text", value)
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._value.get(name)
        if value not in choices:
            raise self.fault(name, f"one of {', '.join(choices)}", value)
        return str(value)

    def content(self, name: str) -> str:
        value = self._value.get(name)
        text = content_text(value, _TEXT_KEYS, _OF_PARTS)
        if text is None:
            raise self.fault(name, _CONTENT, value)
        return text

    def thought(self) -> str:
        """The text of an item of reasoning, "" = it has none."""
        content = self._value.get("content")
        text = "" if content is None else content_text(content, _THOUGHT_KEYS, ())
        if text is None:
            raise self.fault("content", 'a list of {"type": "reasoning_text", "text": ...} parts', content)
        return text

    def tell_others(self, *known: str) -> None:
        tell_names(f"{self.type} item", self._value, ("type", *_OF_ITEMS, *known))


def _add_item(turns: list[Message], item: _Item) -> None:
    if item.type not in _READERS:
        raise item.fault("type", f"one of {', '.join(_READERS)}", item.type)
    _READERS[item.type](turns, item)


def _add_message(turns: list[Message], item: _Item) -> None:
    item.tell_others("role", "content")
    turn = Message(item.choice("role", _ROLES), item.content("content"))
    if turn.role == "assistant" and turns and _is_only_thought(turns[-1]):
        turn = replace(turn, reasoning_content=turns.pop().reasoning_content)
    turns.append(turn)


def _add_call(turns: list[Message], item: _Item) -> None:
    """Calls of one turn follow its text, or one another."""
    item.tell_others("call_id", "name", "arguments")
    function: dict[str, Any] = {"name": item.text("name"), "arguments": item.text("arguments") or {}}
    call: dict[str, Any] = {"id": item.text("call_id"), "type": "function", "function": function}
    last = turns.pop() if turns and turns[-1].role == "assistant" else Message("assistant", "")
    turns.append(replace(last, tool_calls=(*last.tool_calls, call)))


def _add_output(turns: list[Message], item: _Item) -> None:
    item.tell_others("call_id", "output")
    turns.append(Message("tool", item.content("output"), tool_call_id=item.text("call_id")))


def _add_thought(turns: list[Message], item: _Item) -> None:
    item.tell_others("summary", "content", "encrypted_content")
    text = item.thought()
    if text:
        turns.append(Message("assistant", "", reasoning_content=text))
    else:
        tell_ignored("input", "an item of type reasoning without a text")


def _is_only_thought(turn: Message) -> bool:
    return bool(turn.reasoning_content and not turn.content and not turn.tool_calls)


_READERS: Mapping[str, Callable[[list[Message], _Item], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_thought,
}
