"""Turns, functions and choices in Anthropic's form, as a prompt needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import FieldKind, expected, fault, tell_ignored
from fastdeploy_sd.entrypoints.openai.protocol.message import (
    MAX_MESSAGES,
    content_schema,
    content_text,
    tell_names,
)
from fastdeploy_sd.entrypoints.openai.protocol.tools import FUNCTION_SCHEMA, MAX_TOOLS, ToolChoice, Tools
from fastdeploy_sd.errors import shown
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolMode

_TEXT_KEYS = {"text": "text"}
_OF_BLOCKS = ("cache_control", "citations")
_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_CONTENT = 'text or a list of {"type": "text", "text": ...} blocks'


def _block_schema(kind: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"const": kind}, **properties}, "required": ["type", *properties]}


def _message_schema(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, *blocks]}}]}
    properties = {"role": {"const": role}, "content": content}
    return {"type": "object", "properties": properties, "required": ["role", "content"]}


_TEXT_SCHEMA = _block_schema("text", text=_TEXT)
_RESULT_SCHEMA = _block_schema("tool_result", tool_use_id=_TEXT)
_RESULT_SCHEMA["properties"]["content"] = {"anyOf": [content_schema(_TEXT_KEYS), {"type": "null"}]}
_MESSAGE_SCHEMAS = [
    _message_schema("user", _RESULT_SCHEMA),
    _message_schema(
        "assistant",
        _block_schema("thinking", thinking=_TEXT),
        _block_schema("redacted_thinking"),
        _block_schema("tool_use", id=_TEXT, name=_TEXT, input=_OBJECT),
    ),
]
_OF_FUNCTION: dict[str, Any] = {**FUNCTION_SCHEMA["properties"]}  # type: ignore[dict-item]
_INPUT_SCHEMA = {**_OF_FUNCTION.pop("parameters"), "type": "object"}


def _choice_schema(properties: dict[str, Any]) -> dict[str, Any]:
    others = {"disable_parallel_tool_use": {"type": "boolean"}}
    return {"type": "object", "properties": {**properties, **others}, "required": [*properties]}


class SystemText(FieldKind):
    """A text, or text blocks, which are joined by line breaks."""

    schema = content_schema(_TEXT_KEYS)

    def convert(self, value: Any) -> str:
        text = content_text(value, _TEXT_KEYS, _OF_BLOCKS)
        if text is None:
            raise expected(_CONTENT)
        return text


class Turns(FieldKind):
    """Messages of the user and the assistant; results of tools become turns of their own, before the user's text."""

    schema: Mapping[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "items": {"anyOf": _MESSAGE_SCHEMAS},
    }
    takes_null = False

    def convert(self, value: Any) -> tuple[Message, ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
            raise expected(f"a list of 1..{MAX_MESSAGES} messages")
        return tuple(turn for i, message in enumerate(value) for turn in _turns(message, f"[{i}]"))


class AnthropicTools(FieldKind):
    """Functions with an `input_schema`."""

    schema: Mapping[str, Any] = {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "properties": {"type": {"enum": ["custom", None]}, **_OF_FUNCTION, "input_schema": _INPUT_SCHEMA},
            "required": ["name", "input_schema"],
        },
    }

    def convert(self, value: Any) -> tuple[Tool, ...]:
        if not isinstance(value, list):
            raise expected(f"a list of at most {MAX_TOOLS} tools")
        return Tools(is_bare=True).convert([self._function(item, f"[{i}]") for i, item in enumerate(value)])

    @staticmethod
    def _function(item: Any, path: str) -> dict[str, Any]:
        if not isinstance(item, dict):
            raise _inside(path, "a tool with a name and an input_schema", item)
        if item.get("type") not in (None, "custom"):
            text = f"this server runs no tools, only custom is a type, got {shown(item['type'])} at {path}"
            raise fault("not_supported", text)
        schema = item.get("input_schema")
        if not isinstance(schema, dict):
            raise _inside(f"{path}.input_schema", "a JSON schema of an object", schema)
        tell_names("tool", item, ("type", "name", "description", "input_schema", "strict", *_OF_BLOCKS))
        return {**{name: item.get(name) for name in ("name", "description", "strict")}, "parameters": schema}


class AnthropicChoice(FieldKind):
    """Whether and which tools may or must be called, and whether several at a time; the body holds both."""

    schema: Mapping[str, Any] = {
        "anyOf": [
            _choice_schema({"type": {"enum": ["auto", "any", "none"]}}),
            _choice_schema({"type": {"const": "tool"}, "name": _TEXT}),
        ]
    }

    def convert(self, value: Any) -> tuple[ToolChoice, bool]:
        kind = value.get("type") if isinstance(value, dict) else None
        modes = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "none": ToolMode.NONE}
        is_single = value.get("disable_parallel_tool_use", False) if isinstance(value, dict) else False
        if not isinstance(is_single, bool):
            raise _inside(".disable_parallel_tool_use", "true or false", is_single)
        if kind == "tool" and isinstance(value.get("name"), str):
            return ToolChoice(ToolMode.REQUIRED, (value["name"],), is_named=True), not is_single
        if kind not in modes:
            raise expected('{"type": ...} of auto, any or none, or {"type": "tool", "name": ...}')
        return ToolChoice(modes[kind]), not is_single


def _turns(message: Any, path: str) -> list[Message]:
    if not isinstance(message, dict):
        raise _inside(path, "a message with role and content", message)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise _inside(f"{path}.role", "user or assistant", role)
    tell_names("message", message, ("role", "content"))
    if isinstance(content, str):
        return [Message(role, content)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _inside(f"{path}.content", f"{_CONTENT}, or other blocks", content)
    blocks = _OfAssistant() if role == "assistant" else _OfUser()
    for i, block in enumerate(content):
        here = f"{path}.content[{i}]"
        if not blocks.add(block, here):
            wanted = f"{blocks.wanted} (images and documents are not supported)"
            raise _inside(f"{here}.type", wanted, block.get("type"))
    return blocks.turns()


class _OfUser:
    """Blocks of the user."""

    wanted = "text or tool_result"

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._results: list[Message] = []

    def add(self, block: dict[str, Any], path: str) -> bool:
        """Take a block; return whether it is of a type that can be there."""
        match block.get("type"):
            case "text":
                self._texts.append(_field(block, "text", str, path))
            case "tool_result":
                self._results.append(_result(block, path))
            case _:
                return False
        return True

    def turns(self) -> list[Message]:
        """Return results, then the text."""
        has_text = self._texts or not self._results
        return [*self._results, *([Message("user", "\n".join(self._texts))] if has_text else [])]


class _OfAssistant:
    """Blocks of the assistant."""

    wanted = "text, thinking or tool_use"

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, block: dict[str, Any], path: str) -> bool:
        """Take a block; return whether it is of a type that can be there."""
        match block.get("type"):
            case "text":
                self._texts.append(_field(block, "text", str, path))
            case "thinking":
                self._thoughts.append(_field(block, "thinking", str, path))
            case "redacted_thinking":
                tell_ignored("messages", "a block of the type redacted_thinking")
            case "tool_use":
                self._calls.append(_call(block, path))
            case _:
                return False
        return True

    def turns(self) -> list[Message]:
        """Return one turn with all of it."""
        thought = "\n".join(self._thoughts) or None
        calls = tuple(self._calls)
        return [Message("assistant", "\n".join(self._texts), tool_calls=calls, reasoning_content=thought)]


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    arguments = json.dumps(_field(block, "input", dict, path), ensure_ascii=False)
    function = {"name": _field(block, "name", str, path), "arguments": arguments}
    return {"id": _field(block, "id", str, path), "type": "function", "function": function}


def _result(block: dict[str, Any], path: str) -> Message:
    tell_names("tool_result block", block, ("type", "tool_use_id", "content", "is_error", *_OF_BLOCKS))
    content = block.get("content", "")
    text = content_text("" if content is None else content, _TEXT_KEYS, _OF_BLOCKS)
    if text is None:
        raise _inside(f"{path}.content", _CONTENT, content)
    prefix = "Error: " if block.get("is_error") is True else ""
    return Message("tool", prefix + text, tool_call_id=_field(block, "tool_use_id", str, path))


def _field(block: dict[str, Any], name: str, kind: type, path: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        raise _inside(f"{path}.{name}", "text" if kind is str else "an object", value)
    return value


def _inside(path: str, what: str, got: object) -> Exception:
    return fault("inside", f"{path}: expected {what}, got {shown(got)}")
