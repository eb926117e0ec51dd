"""Fields about functions: what a request offers (`tools`, the older `functions`) and what may be called."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import FieldKind, expected, fault
from fastdeploy_sd.entrypoints.openai.protocol.message import tell_names
from fastdeploy_sd.errors import shown
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolMode, ToolUse

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18  # of their JSON, all together
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_SCHEMA = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
FUNCTION_SCHEMA = {
    "type": "object",
    "properties": {
        "name": _NAME_SCHEMA,
        "description": {"type": ["string", "null"]},
        "parameters": {
            "type": ["object", "null"],
            "properties": {
                "type": {"const": "object"},
                "properties": {"type": "object"},
                "required": {"type": "array"},
            },
        },
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
_FLAT_SCHEMA = {
    **FUNCTION_SCHEMA,
    "properties": {"type": {"const": "function"}, **FUNCTION_SCHEMA["properties"]},  # type: ignore[dict-item]
}
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": FUNCTION_SCHEMA},
    "required": ["function"],
}
_MODES = tuple(mode.value for mode in ToolMode)


def _schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


_NAMED_SCHEMA = _schema(name={"type": "string"})


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What `tool_choice` says.

    Attributes:
        names: of the only functions that may be called, None = all.
    """

    mode: ToolMode
    names: tuple[str, ...] | None = None
    is_named: bool = False

    @property
    def flat(self) -> str | dict[str, Any]:
        """The choice in the form of /v1/responses."""
        if self.names is None:
            return self.mode.value
        functions = [{"type": "function", "name": name} for name in self.names]
        if self.is_named:
            return functions[0]
        return {"type": "allowed_tools", "mode": self.mode.value, "tools": functions}


class Tools(FieldKind):
    """Functions with a type, in /v1/responses flat; the older `functions` are bare, without one."""

    def __init__(self, *, is_flat: bool = False, is_bare: bool = False) -> None:
        self._is_flat, self._is_bare = is_flat, is_bare
        item = FUNCTION_SCHEMA if is_bare else _FLAT_SCHEMA if is_flat else _TOOL_SCHEMA
        self.schema = {"type": "array", "maxItems": MAX_TOOLS, "items": item}

    def convert(self, value: Any) -> tuple[Tool, ...]:
        if not isinstance(value, list) or len(value) > MAX_TOOLS:
            raise expected(f"a list of at most {MAX_TOOLS} functions")
        tools = tuple(self._tool(item, f"[{i}]") for i, item in enumerate(value))
        names = [tool.name for tool in tools]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise _inside(f"[{i}]", "a name that no other function has", name)
        num_chars = len(json.dumps([tool.definition for tool in tools]))
        if num_chars > MAX_TOOLS_CHARS:
            raise fault("refused", f"expected at most {MAX_TOOLS_CHARS} characters of JSON in all, got {num_chars}")
        return tools

    def _tool(self, value: Any, path: str) -> Tool:
        if not isinstance(value, dict):
            raise _inside(path, "a function", value)
        if self._is_bare:
            return _function(value, path, ())
        kind = value.get("type", "function")
        if kind != "function":
            text = f"this server runs no tools, only function is a type, got {shown(kind)} at {path}"
            raise fault("not_supported", text)
        if self._is_flat:
            return _function(value, path, ("type",))
        tell_names("tool", value, ("type", "function"))
        return _function(value.get("function"), f"{path}.function", ())


class ToolChoiceField(FieldKind):
    """Whether and which functions may or must be called; in /v1/responses a name is next to the type."""

    def __init__(self, *, is_flat: bool = False) -> None:
        self._is_flat = is_flat
        named = {"name": {"type": "string"}} if is_flat else {"function": _NAMED_SCHEMA}
        tools = {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": _schema(**named)}
        inner = {"mode": {"enum": [ToolMode.AUTO.value, ToolMode.REQUIRED.value]}, "tools": tools}
        allowed = inner if is_flat else {"allowed_tools": _schema(**inner)}
        of_name = _schema(type={"const": "function"}, **named)
        of_names = _schema(type={"const": "allowed_tools"}, **allowed)
        self.schema = {"anyOf": [{"enum": list(_MODES)}, of_name, of_names]}

    def convert(self, value: Any) -> ToolChoice:
        if isinstance(value, str) and value in _MODES:
            return ToolChoice(ToolMode(value))
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "function":
            return ToolChoice(ToolMode.REQUIRED, (self._name(value),), is_named=True)
        if kind == "allowed_tools":
            return self._allowed(value if self._is_flat else value.get("allowed_tools"))
        if isinstance(kind, str):
            raise fault("not_supported", f"this server runs no tools, only function is a type, got {shown(kind)}")
        form = (
            '{"type": "function", "name": ...}' if self._is_flat else '{"type": "function", "function": {"name": ...}}'
        )
        raise expected(f"one of {', '.join(_MODES)}, {form} or an object of the type allowed_tools")

    def _allowed(self, value: Any) -> ToolChoice:
        mode = value.get("mode") if isinstance(value, dict) else None
        tools = value.get("tools") if isinstance(value, dict) else None
        if (
            mode not in (ToolMode.AUTO, ToolMode.REQUIRED)
            or not isinstance(tools, list)
            or not 1 <= len(tools) <= MAX_TOOLS
        ):
            raise expected("allowed_tools with a mode, auto or required, and a list of tools")
        return ToolChoice(ToolMode(mode), tuple(map(self._name, tools)))

    def _name(self, value: Any) -> str:
        inner = value if self._is_flat or not isinstance(value, dict) else value.get("function")
        return _name_of(inner)


class FunctionCallField(FieldKind):
    """OpenAI's older name of tool_choice: none, auto, or the name of a function."""

    schema = {"anyOf": [{"enum": ["none", "auto"]}, _NAMED_SCHEMA]}  # noqa: RUF012

    def convert(self, value: Any) -> ToolChoice:
        if value in ("none", "auto"):
            return ToolChoice(ToolMode(value))
        if not isinstance(value, dict):
            raise expected('one of none, auto or {"name": ...}')
        return ToolChoice(ToolMode.REQUIRED, (_name_of(value),), is_named=True)


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, is_parallel: bool | None) -> ToolUse | None:
    """Return what fields without faults say about functions, None = none may be called."""
    choice = choice or ToolChoice(ToolMode.AUTO)
    if not tools or choice.mode is ToolMode.NONE:
        return None
    names = frozenset(tool.name for tool in tools) if choice.names is None else frozenset(choice.names)
    return ToolUse(tuple(tools), choice.mode, names, is_parallel is not False, choice.is_named)


def tool_faults(names: tuple[str, str], tools: Sequence[Tool] | None, choice: ToolChoice | None) -> list[Fault]:
    """Return what is wrong between the functions and the choice, which have these names in the body."""
    of_tools, of_choice = names
    if choice is None or (choice.names is None and choice.mode is not ToolMode.REQUIRED):
        return []
    if not tools:
        return [Fault(f"{of_choice}: expected only with {of_tools}, got none", of_choice)]
    known = {tool.name for tool in tools}
    unknown = [name for name in choice.names or () if name not in known]
    if unknown:
        return [Fault(f"{of_choice}: expected the name of one of {of_tools}, got {shown(unknown[0])}", of_choice)]
    return []


def _function(value: Any, path: str, known: tuple[str, ...]) -> Tool:
    """A function's definition; `known` names what it has in addition to its own."""
    if not isinstance(value, dict):
        raise _inside(path, 'a function of the form {"name": ..., "description": ..., "parameters": ...}', value)
    tell_names("function of a tool", value, ("name", "description", "parameters", "strict", *known))
    name, description, strict = value.get("name"), value.get("description"), value.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _inside(f"{path}.name", "1..64 letters, digits and characters of _-", name)
    if not isinstance(description, str | None):
        raise _inside(f"{path}.description", "text", description)
    if not isinstance(strict, bool | None):
        raise _inside(f"{path}.strict", "true or false", strict)
    parameters = value.get("parameters")
    _verify_schema(parameters, f"{path}.parameters")
    return Tool(name, description, parameters, bool(strict))


def _verify_schema(schema: Any, path: str) -> None:
    """Look at the top of a schema; what is inside matters only where calls are guided."""
    if not isinstance(schema, dict | None):
        raise _inside(path, "a JSON schema of an object", schema)
    if schema is None:
        return
    if schema.get("type", "object") != "object":
        raise _inside(f"{path}.type", "object", schema["type"])
    if not isinstance(schema.get("properties", {}), dict):
        raise _inside(f"{path}.properties", "an object", schema["properties"])
    if not isinstance(schema.get("required", []), list):
        raise _inside(f"{path}.required", "a list", schema["required"])


def _name_of(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise expected("the name of a function")
    return name


def _inside(path: str, what: str, got: object) -> Exception:
    return fault("inside", f"{path}: expected {what}, got {shown(got)}")
