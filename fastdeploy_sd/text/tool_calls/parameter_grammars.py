"""Grammars of the parameters of a call: one JSON object, or values one by one between tags.

Source: the syntax is that of llguidance (docs/syntax.md there), a dialect of Lark's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.text.guidance.closed_schema import closed
from fastdeploy_sd.text.tool_calls.call_format import CallFormat, ParameterText
from fastdeploy_sd.text.tool_calls.tools import Tool

# As chat templates write JSON; free white space invites a model to write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarRules:
    """Rules by name; `hidden_ids` of texts that are not shown stand in a grammar as tokens."""

    def __init__(self, hidden_ids: Mapping[str, int]) -> None:
        self._hidden_ids = hidden_ids
        words = sorted(hidden_ids, key=len, reverse=True)
        self._hidden = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None
        self._lines: list[str] = []

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        return self._add("r", body, attributes)

    def add_terminal(self, body: str) -> str:
        """Add a rule that is one regular expression, and return its name."""
        return self._add("T", body, "")

    def _add(self, kind: str, body: str, attributes: str) -> str:
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def id_of(self, text: str) -> int | None:
        """Return the id of a text that is one hidden token, None when it is not."""
        return self._hidden_ids.get(text)

    def literal(self, text: str) -> str:
        """Return what matches exactly this text, "" for none."""
        parts = [text] if self._hidden is None else self._hidden.split(text)
        return " ".join(map(self._symbol, filter(None, parts)))

    def quoted(self, text: str) -> str:
        """Return what matches exactly this text, in which no hidden token acts."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Mapping[str, Any], *, is_lenient: bool) -> str:
        """Return what matches JSON of a schema; `is_lenient` passes over keywords that the library does not know."""
        options = {**_SPACING, "lenient": True} if is_lenient else _SPACING
        return self.add(f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")

    def text(self, start: str) -> str:
        """Return the grammar, whose whole is this."""
        return "\n".join((f"start: {start}", *self._lines))

    def _symbol(self, text: str) -> str:
        token_id = self.id_of(text)
        return self.quoted(text) if token_id is None else f"<[{token_id}]>"


ANY_TEXT = r"/(.|\n)*/"
_ANY_OBJECT = {"type": "object"}
_NAME_IN_TAG = re.compile(r"[^<>\n]{1,200}")
_DEFINITIONS = ("$defs", "definitions")
_COMBINED = ("allOf", "oneOf", "not", "if", "patternProperties", "dependentSchemas", "unevaluatedProperties")


def parameters_rule(rules: GrammarRules, form: CallFormat, tool: Tool, *, has_schema: bool) -> str:
    """Return what matches a call's parameters, by the schema with `has_schema`, else any; raises BadRequest."""
    text = form.text.parameters
    if text is not None:
        return _between_tags(rules, text, tool)
    if not has_schema:
        return rules.json(_ANY_OBJECT, is_lenient=True)
    schema = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return rules.json(closed({"type": "object", **schema}), is_lenient=not tool.strict)


def _between_tags(rules: GrammarRules, text: ParameterText, tool: Tool) -> str:
    schema = tool.parameters or {}
    combined = [key for key in (*_COMBINED, "anyOf", "$ref") if key in schema]
    if combined:
        raise _refused(tool, f"parameters that are all in properties, got {combined[0]}")
    required = schema.get("required", ())
    parts = []
    for name, inner in tool.properties.items():
        if not _NAME_IN_TAG.fullmatch(name):
            raise _refused(
                tool, f"names of parameters of 1..200 characters but <, > and line breaks, got {shown(name)}"
            )
        opening = rules.literal(text.before_name + name + text.before_value)
        value = _value_between_tags(rules, text, tool, name, inner if isinstance(inner, Mapping) else {})
        part = rules.add(f"{opening} {value}")
        parts.append(part if name in required else f"{part}?")
    return " ".join(parts)


def _value_between_tags(
    rules: GrammarRules, text: ParameterText, tool: Tool, name: str, schema: Mapping[str, Any]
) -> str:
    """A value and the tag after it."""
    function = tool.as_callable()
    if name not in (*function.text_parameters, *function.nullable_texts):
        definitions = {key: tool.parameters[key] for key in _DEFINITIONS if tool.parameters and key in tool.parameters}
        value = rules.json(closed({**schema, **definitions}), is_lenient=not tool.strict)
        return f"{value} {rules.literal(text.after)}"
    return _text_value(rules, text, tool, name, schema)


def _text_value(rules: GrammarRules, text: ParameterText, tool: Tool, name: str, schema: Mapping[str, Any]) -> str:
    """A value that is a text or null, and the tag after it."""
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        return "(" + " | ".join(rules.add(_text_value(rules, text, tool, name, option)) for option in options) + ")"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if schema.get("type") == "null":
        choices = [None]
    if not isinstance(choices, list):
        return _free_text(rules, text.after, schema)
    words = [choice if isinstance(choice, str) else "null" for choice in choices]
    tag = text.after.strip("\n")
    if any(tag in word for word in words):
        raise _refused(tool, f"values of {name} without {tag}, got one with it")
    return f"({' | '.join(map(rules.quoted, words))}) {rules.literal(text.after)}"


def _free_text(rules: GrammarRules, after: str, schema: Mapping[str, Any]) -> str:
    """Text and the tag after it; the text ends where the tag first occurs."""
    tag = after.strip("\n")
    if rules.id_of(tag) is not None:
        return f"{rules.add(_text_pattern(schema))} {rules.literal(after)}"
    border = after[: after.index(tag)]
    terminal = rules.add_terminal(f"({_text_pattern(schema)} & ~/(.|\\n)*{_in_slashes(tag)}(.|\\n)*/)")
    body = rules.add(f"{terminal} {rules.quoted(border + tag)}", "[lazy]")
    return f"{body} {rules.literal(after[len(border) + len(tag) :])}"


def _text_pattern(schema: Mapping[str, Any]) -> str:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else r"(.|\n)*"
        end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else r"(.|\n)*"
        inner = pattern.removeprefix("^") if not begin else pattern
        inner = inner.removesuffix("$") if not end else inner
        return f"/{begin}({_in_slashes(inner)}){end}/"
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(low, int) or not isinstance(high, int | None) or (low, high) == (0, None):
        return ANY_TEXT
    return rf"/(.|\n){{{low},{'' if high is None else high}}}/"


def _in_slashes(pattern: str) -> str:
    """A pattern as it stands between slashes, whatever is in it."""
    escapes = {"/": r"\x2f", r"\/": r"\x2f", "\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda match: escapes.get(match[0], match[0]), pattern)


def _refused(tool: Tool, what: str) -> BadRequest:
    return BadRequest(f"tools: {tool.name}: expected, to guide its calls in this model's format, {what}", param="tools")
