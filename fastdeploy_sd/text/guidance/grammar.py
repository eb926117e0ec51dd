"""Turns structured output options (JSON schema, regex, choice, grammar) into a grammar. Knows no vocabulary.

Every grammar is text in the library's Lark syntax with a rule `start`, so that it can be embedded in another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.closed_schema import closed
from fastdeploy_sd.text.guidance.limits import TEXT_OR_COMMENT, check_repeats
from fastdeploy_sd.text.guidance.schema_rules import check_schema

MAX_SCHEMA_CHARS = 1 << 16
MAX_REGEX_CHARS = 1 << 13
MAX_GRAMMAR_TEXT_CHARS = 1 << 15
MAX_RULES = 500
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 1 << 16
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# As Python's json.dumps writes: what most models write by themselves where they write on one line. With nothing to
# choose between values, a key is forced as a whole.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_SPACE = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_OPTIONS = "x-guidance"
# Blocks of other languages would be limited by nothing here; the rest of the library's directives is of no use.
_DIRECTIVE = re.compile(r"%(?!ignore\b)\w+|@")
_SURROGATE = re.compile("[\ud800-\udfff]")
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w.\-]*(?:\[[^\]\n]*\]|\{[^}\n]*\})?\s*:", re.MULTILINE)
_REGEX = re.compile(r"(?<=/)(?:\\.|[^/\\\n])+(?=/)")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output must have: exactly one of the first five; `grammar` is in Lark's syntax or GBNF.

    A regex matches the whole output. Objects of a schema have the members that it describes, see `closed`.
    `whitespace_pattern` may stand between the parts of JSON; None = one space after
    each comma and colon, or none with `disable_any_whitespace`.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    @classmethod
    def of(cls, given: Any, field: str) -> StructuredOutputs:
        """Return what was given, itself or some attributes by name; raises BadRequest naming the attribute."""
        if isinstance(given, cls):
            return given
        names = [f.name for f in fields(cls)]
        if not isinstance(given, Mapping):
            raise _wrong(field, f"an object with one of {', '.join(KINDS)}", given)
        for name in given:
            if name not in names:
                raise BadRequest(f"{field}.{shown(name)}: unknown field, expected {', '.join(names)}", param=field)
        return cls(**given)


KINDS = ("json", "json_object", "regex", "choice", "grammar")


def grammar_of(outputs: StructuredOutputs, field: str) -> str:
    """Return the grammar of what a client asked for in `field`; raises BadRequest. It may still not compile."""
    given = [kind for kind in KINDS if getattr(outputs, kind) not in (None, False)]
    if len(given) != 1:
        raise _wrong(field, f"exactly one of {', '.join(KINDS)}", ", ".join(given) or "none", is_text=True)
    kind = given[0]
    name = field if field.rpartition(".")[2] in _FIELDS_OF_ONE else f"{field}.{kind}"
    _verify_spaces(outputs, field, kind)
    value = getattr(outputs, kind)
    match kind:
        case "json":
            return _closed_grammar(_schema(value, name), name, outputs)
        case "json_object":
            if value is not True:
                raise _wrong(name, "true", value)
            return json_grammar(_ANY_OBJECT, name, outputs)
        case "regex":
            return _regex_grammar(_text(value, name, MAX_REGEX_CHARS), name)
        case "choice":
            return _choice_grammar(value, name)
        case _:
            return _own_grammar(_text(value, name, MAX_GRAMMAR_TEXT_CHARS), name)


# Fields whose own name says the kind.
_FIELDS_OF_ONE = ("response_format", "schema", "format", "parameters", *(f"guided_{kind}" for kind in KINDS))


def json_grammar(schema: Mapping[str, Any], field: str, outputs: StructuredOutputs | None = None) -> str:
    """Return the grammar of the JSON values of a schema; raises BadRequest where it cannot be kept word for word."""
    _verify_is_json(schema, field)
    return _json_grammar(schema, field, outputs)


def _json_grammar(schema: Mapping[str, Any], field: str, outputs: StructuredOutputs | None) -> str:
    _verify_words(schema, field)
    text = json.dumps({**schema, _OPTIONS: _spaces(outputs)}, allow_nan=False)
    return f"start: %json {text}"


def _closed_grammar(schema: Mapping[str, Any], field: str, outputs: StructuredOutputs) -> str:
    """Return the grammar of a client's schema, which is read as other servers read it; see `closed`."""
    _verify_is_json(schema, field)
    return _json_grammar(closed(schema), field, outputs)


def verify_schema(schema: Mapping[str, Any], field: str) -> None:
    """Refuse a schema that the grammar library must not get, in whatever grammar; raises BadRequest."""
    _verify_is_json(schema, field)
    _verify_words(schema, field)


def _verify_words(schema: Mapping[str, Any], field: str) -> None:
    if _OPTIONS in schema:
        raise BadRequest(f"{field}: expected no {_OPTIONS}, got one", param=_param(field))
    try:
        check_schema(schema)
    except ValueError as error:
        raise BadRequest(f"{field}{error}", param=_param(field)) from None  # it begins with the place inside
    _verify_repeats(_patterns_in(schema), field)


def _verify_is_json(schema: Mapping[str, Any], field: str) -> None:
    """Refuse what is no JSON or too large; raises BadRequest."""
    try:
        num_chars = len(json.dumps(schema, allow_nan=False))
    except (ValueError, RecursionError, TypeError) as error:
        raise BadRequest(f"{field}: expected JSON, got {error}", param=_param(field)) from None
    if num_chars > MAX_SCHEMA_CHARS:
        raise BadRequest(
            f"{field}: expected at most {MAX_SCHEMA_CHARS} characters of JSON, got {num_chars}", param=_param(field)
        )


def against_grammar(params: SamplingParams) -> list[BadRequest]:
    """Return what is wrong with sampling options and any grammar: those that forbid the end that it asks for."""
    return [
        BadRequest(f"{name}: expected {wanted} with a grammar, which says where the output ends, got {got}", param=name)
        for name, wanted, got, is_wrong in (
            ("ignore_eos", "false", "true", params.ignore_eos),
            ("min_tokens", "0", params.min_tokens, params.min_tokens > 0),
        )
        if is_wrong
    ]


def _schema(value: object, field: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        text = _text(value, field, MAX_SCHEMA_CHARS)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{field}: expected JSON, got {error}", param=_param(field)) from None
    if not isinstance(value, Mapping):
        raise _wrong(field, "a JSON schema (an object)", value)
    return value


def _spaces(outputs: StructuredOutputs | None) -> Mapping[str, Any]:
    if outputs is not None and outputs.whitespace_pattern is not None:
        return {"whitespace_pattern": outputs.whitespace_pattern}
    return _NO_SPACE if outputs is not None and outputs.disable_any_whitespace else _SEPARATORS


def _verify_spaces(outputs: StructuredOutputs, field: str, kind: str) -> None:
    pattern, is_disabled = outputs.whitespace_pattern, outputs.disable_any_whitespace
    if pattern is not None:
        if not kind.startswith("json"):
            raise _wrong(f"{field}.whitespace_pattern", "none with a form that is not JSON", pattern)
        if is_disabled:
            raise _wrong(f"{field}.whitespace_pattern", "none with disable_any_whitespace", pattern)
        name = f"{field}.whitespace_pattern"
        _verify_repeats([_text(pattern, name, MAX_REGEX_CHARS)], name)
    if is_disabled is not None and not isinstance(is_disabled, bool):
        raise _wrong(f"{field}.disable_any_whitespace", "true or false", is_disabled)


def _regex_grammar(regex: str, field: str) -> str:
    _verify_repeats([regex], field)
    body = regex_to_lark(regex, "")
    if "\n" in body:
        raise _wrong(field, "a regular expression on one line", regex)
    return f"start: /{body}/"


def _choice_grammar(choices: object, field: str) -> str:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 1 <= len(choices) <= MAX_CHOICES:
        raise _wrong(field, f"a list of 1..{MAX_CHOICES} texts", choices)
    num_chars = 0
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise _wrong(f"{field}[{i}]", "a text of 1 character or more", choice)
        if _SURROGATE.search(choice):
            raise _wrong(f"{field}[{i}]", "a text without lone surrogates", choice)
        num_chars += len(choice)
    if num_chars > MAX_CHOICE_CHARS:
        raise BadRequest(
            f"{field}: expected at most {MAX_CHOICE_CHARS} characters in all, got {num_chars}", param=_param(field)
        )
    # One word of the lexer: as rules they would all be tried side by side in every step.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _own_grammar(text: str, field: str) -> str:
    if text.lstrip().startswith("{"):
        raise _wrong(field, "a grammar in the syntax of Lark or GBNF", text)
    if "::=" in text:
        try:
            text = any_to_lark(text).replace("%llguidance {}", "")
        except Exception as error:  # the converter raises whatever its parser does
            raise BadRequest(
                f"{field}: expected a grammar in the syntax of GBNF, got {error}", param=_param(field)
            ) from None
    directive = _DIRECTIVE.search(TEXT_OR_COMMENT.sub(" ", text))
    if directive is not None:
        raise BadRequest(f"{field}: expected no directives but %ignore, got {directive[0]}", param=_param(field))
    # Ids of tokens that text shows: the library cannot take them back, as drafts that were wrong must be.
    if "<[" in TEXT_OR_COMMENT.sub(" ", text):
        raise BadRequest(f"{field}: expected special tokens by their names, got ids (<[...]>)", param=_param(field))
    # The library recurses from rule to rule, on a stack of limited size.
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise BadRequest(f"{field}: expected at most {MAX_RULES} rules, got {num_rules}", param=_param(field))
    _verify_repeats((found[0] for found in _REGEX.finditer(text)), field)
    return text


def _verify_repeats(regexes: Iterable[str], field: str) -> None:
    for regex in regexes:
        try:
            check_repeats(regex)
        except ValueError as error:
            raise BadRequest(f"{field}: {error}", param=_param(field)) from None


def _patterns_in(schema: object) -> Iterator[str]:
    """The regular expressions of a schema, and what looks like one."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.values()
            pattern, names = value.get("pattern"), value.get("patternProperties")
            if isinstance(pattern, str):
                yield pattern
            if isinstance(names, Mapping):
                yield from names
        elif isinstance(value, list):
            left += value


def _text(value: object, field: str, limit: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(field, "text", value)
    if len(value) > limit:
        raise BadRequest(f"{field}: expected at most {limit} characters, got {len(value)}", param=_param(field))
    return value


def _wrong(field: str, wanted: str, got: object, *, is_text: bool = False) -> BadRequest:
    return BadRequest(f"{field}: expected {wanted}, got {got if is_text else shown(got)}", param=_param(field))


def _param(field: str) -> str:
    return re.split(r"[.\[]", field, maxsplit=1)[0]
