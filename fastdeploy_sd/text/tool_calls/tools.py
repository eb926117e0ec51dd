"""The tools of a request: which functions it offers, and how many may or must be called."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.text.tool_calls.call_format import CallableFunction

Schema = Mapping[str, Any]


class ToolMode(enum.StrEnum):
    """Whether functions may or must be called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a request offers; the schema guides a `strict` one also where the model may call it or not."""

    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """The function as chat templates read it, in OpenAI's form; what it does not say is left out."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}

    @property
    def flat_definition(self) -> dict[str, Any]:
        """The function in the form of /v1/responses."""
        inner = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", **inner, "strict": self.strict}

    @property
    def properties(self) -> Schema:
        """Schemas of the parameters by name."""
        properties = (self.parameters or {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def as_callable(self) -> CallableFunction:
        """Return what reading calls of it needs."""
        texts = {name: _text_kind(schema) for name, schema in self.properties.items()}
        return CallableFunction(
            self.name,
            text_parameters=tuple(name for name, kind in texts.items() if kind is _Text.ALWAYS),
            nullable_texts=tuple(name for name, kind in texts.items() if kind is _Text.OR_NULL),
        )


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of a request and how they may be used; `is_named` wants one call of the only name, nothing else."""

    tools: tuple[Tool, ...]
    mode: ToolMode
    names: frozenset[str]
    is_parallel: bool = True
    is_named: bool = False

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if tool.name in self.names)

    @property
    def takes_one_call(self) -> bool:
        """Whether an answer has one call at most."""
        return self.is_named or not self.is_parallel


class _Text(enum.Enum):
    ALWAYS = enum.auto()
    OR_NULL = enum.auto()
    NO = enum.auto()


def _text_kind(schema: object) -> _Text:
    """Whether every value of a schema is a text."""
    if not isinstance(schema, Mapping):
        return _Text.NO
    kinds = schema.get("type")
    if kinds is not None:
        return _joined({_kind_of_type(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])})
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        return _joined({_kind_of_value(value) for value in choices})
    options = schema.get("anyOf", schema.get("oneOf"))
    return _joined({_kind_of_option(option) for option in options}) if isinstance(options, list) else _Text.NO


def _kind_of_type(kind: object) -> _Text:
    return {"string": _Text.ALWAYS, "null": _Text.OR_NULL}.get(str(kind), _Text.NO)


def _kind_of_value(value: object) -> _Text:
    return _Text.ALWAYS if isinstance(value, str) else _Text.OR_NULL if value is None else _Text.NO


def _kind_of_option(option: object) -> _Text:
    if isinstance(option, Mapping) and option.get("type") == "null":
        return _Text.OR_NULL
    return _text_kind(option)


def _joined(kinds: set[_Text]) -> _Text:
    """Of values that are any of these; null alone is no text."""
    if _Text.NO in kinds or kinds <= {_Text.OR_NULL}:
        return _Text.NO
    return _Text.OR_NULL if _Text.OR_NULL in kinds else _Text.ALWAYS
