"""The fields that say what form an output must have: OpenAI's, vLLM's and FastDeploy's, each as StructuredOutputs.

Only the shape of the fields is checked here; what a schema or a grammar says is checked in text/guidance/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, FieldKind, Only, expected, fault, unknown_field
from fastdeploy_sd.errors import shown
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.grammar import KINDS, MAX_CHOICES, StructuredOutputs, against_grammar

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_FLAG = {"type": "boolean"}
_NAMED_SCHEMA = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "description": {"anyOf": [_TEXT, {"type": "null"}]},
    "schema": {"anyOf": [_OBJECT, {"type": "null"}]},
    "strict": {"anyOf": [_FLAG, {"type": "null"}]},
}
_NO_MORE = {"additionalProperties": False}
_TAG = "a structural tag is not: use tools, or a grammar"


class Asked(NamedTuple):
    """What a body asks of the form of its output, and the field that does, for errors."""

    field: str
    outputs: StructuredOutputs


def _named_schema(value: Any, place: str) -> Asked:
    """Read an object with a schema that has a name, which is OpenAI's to show and says nothing to a model."""
    if not isinstance(value, Mapping):
        raise fault("inside", f"{place}: expected an object with name and schema, got {shown(value)}")
    for name in value:
        if name not in (*_NAMED_SCHEMA, "" if place else "type"):
            raise fault("inside", f"{place}.{shown(name)[:80]}: unknown field")
    if not isinstance(value.get("name"), str) or not _NAME.fullmatch(value["name"]):
        wanted = "1..64 letters, digits, _ and -"
        raise fault("inside", f"{place}.name: expected {wanted}, got {shown(value.get('name'))}")
    for name, kind, wanted in (("description", str, "text"), ("strict", bool, "true or false")):
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise fault("inside", f"{place}.{name}: expected {wanted}, got {shown(value[name])}")
    return _schema(value.get("schema"), place)


def _schema(schema: Any, place: str) -> Asked:
    """Read the schema of an object, which may be left out: any JSON object, then."""
    if schema is None:
        return Asked("", StructuredOutputs(json_object=True))
    if not isinstance(schema, Mapping):
        raise fault("inside", f"{place}.schema: expected a JSON schema (an object), got {shown(schema)}")
    return Asked(f"{place}.schema", StructuredOutputs(json=schema))


_CHOICES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES}
_SCHEMAS_OF_KINDS: dict[str, dict[str, Any]] = {
    "json": {"anyOf": [_OBJECT, _TEXT]},
    "json_object": _FLAG,
    "regex": _TEXT,
    "choice": _CHOICES,
    "grammar": _TEXT,
}
_ATTRIBUTES = {**_SCHEMAS_OF_KINDS, "whitespace_pattern": _TEXT, "disable_any_whitespace": _FLAG}
_CLOSED = "disable_additional_properties"  # of vLLM; it is always so
_NULLABLE: dict[str, Any] = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in _ATTRIBUTES.items()}
_NULLABLE |= {"structural_tag": {"type": "null"}, _CLOSED: {"anyOf": [_FLAG, {"type": "null"}]}}
_TYPES: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "json": ("a JSON schema (an object, or its text)", (str, dict)),
    "json_object": ("true or false", bool),
    "regex": ("text", str),
    "choice": (f"a list of 1..{MAX_CHOICES} texts", list),
    "grammar": ("text", str),
    "whitespace_pattern": ("text", str),
    "disable_any_whitespace": ("true or false", bool),
}


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The form of a Response's text (None = anything), and its definition as given, for the answer to repeat."""

    asked: Asked | None
    definition: Mapping[str, Any]


class Format(FieldKind):
    """An object with a type: text, json_object or json_schema; flat = the schema is next to the type."""

    def __init__(self, *, is_flat: bool) -> None:
        self._is_flat = is_flat
        plain: list[dict[str, Any]] = [
            {"type": "object", "properties": {"type": {"const": "text"}}},
            {"type": "object", "properties": {"type": {"const": "json_object"}, "schema": _NAMED_SCHEMA["schema"]}},
        ]
        named: dict[str, Any] = {"type": "object", "properties": _NAMED_SCHEMA, "required": ["name"], **_NO_MORE}
        if is_flat:
            schema = {**named, "properties": {"type": {"const": "json_schema"}, **_NAMED_SCHEMA}}
        else:
            schema = {"type": "object", "properties": {"type": {"const": "json_schema"}, "json_schema": named}}
            schema["required"] = ["json_schema"]
        kinds = [{**kind, "required": ["type", *kind.get("required", [])], **_NO_MORE} for kind in (*plain, schema)]
        self.schema = {"anyOf": kinds}

    def convert(self, value: Any) -> Asked | None:
        """Return what is asked, with where it is below the field; None = anything."""
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "structural_tag":
            raise fault("not_supported", _TAG)
        if kind not in ("text", "json_object", "json_schema"):
            raise expected('an object with the type "text", "json_object" or "json_schema"')
        place = "" if self._is_flat else ".json_schema"
        of_kind = {"json_object": ["schema"], "json_schema": _NAMED_SCHEMA if self._is_flat else ["json_schema"]}
        for name in value:
            if name not in ("type", *of_kind.get(kind, ())):
                raise fault("below", f"{shown(name)[:80]}: unknown field with the type {kind}")
        if kind == "text":
            return None
        if kind == "json_object":
            return _schema(value.get("schema"), "")
        return _named_schema(value if self._is_flat else value.get("json_schema"), place)


class FlatFormat(FieldKind):
    """The same for /v1/responses, whose answers repeat it."""

    def __init__(self) -> None:
        self._format = Format(is_flat=True)
        self.schema = self._format.schema

    def convert(self, value: Any) -> TextFormat:
        return TextFormat(self._format.convert(value), {name: item for name, item in value.items() if item is not None})


class _OneOf(FieldKind):
    """One attribute of StructuredOutputs, checked with the grammar; `unset` is another way to say null."""

    def __init__(self, kind: str, unset: str | None = None) -> None:
        self._kind = kind
        self._unset = unset
        self.schema = _SCHEMAS_OF_KINDS[kind]

    def convert(self, value: Any) -> StructuredOutputs | None:
        if self._unset is not None and value == self._unset:
            return None
        _verify_type(self._kind, value, "")
        return None if value is False else StructuredOutputs(**{self._kind: value})


class _Outputs(FieldKind):
    """vLLM's object: the attributes of StructuredOutputs by their names."""

    schema = MappingProxyType({"type": "object", "properties": _NULLABLE, **_NO_MORE})

    def convert(self, value: Any) -> StructuredOutputs:
        if not isinstance(value, Mapping):
            raise expected(f"an object with one of {', '.join(KINDS)}")
        given: dict[str, Any] = {}
        for name, item in value.items():
            if name not in _NULLABLE:
                raise fault("below", unknown_field(name, _ATTRIBUTES))
            if name == "structural_tag" and item is not None:
                raise fault("not_supported", _TAG)
            if name == _CLOSED and item is not None and not isinstance(item, bool):
                raise fault("inside", f".{name}: expected true or false, got {shown(item)}")
            if name in _ATTRIBUTES and item is not None:
                _verify_type(name, item, f".{name}")
                given[name] = item
        return StructuredOutputs(**given)


def _verify_type(name: str, value: object, place: str) -> None:
    """Refuse a value that StructuredOutputs cannot have, and choices that are none."""
    wanted, types = _TYPES[name]
    if not isinstance(value, types):
        raise fault("inside", f"{place}: expected {wanted}, got {shown(value)}")
    if isinstance(value, list):
        if not 1 <= len(value) <= MAX_CHOICES:
            raise fault("inside", f"{place}: expected {wanted}, got {shown(value)}")
        for i, choice in enumerate(value):
            if not isinstance(choice, str) or not choice:
                text = f"{place}[{i}]: expected a text of 1 character or more, got {shown(choice)}"
                raise fault("inside", text)


class StructuredFields(Body):
    """What form an output must have; at most one of these fields says it, or several say the same.

    Attributes:
        response_format: OpenAI's. A schema is followed whether it is strict or not; its name and description
            have no effect.
        structured_outputs: vLLM's object; see StructuredOutputs.
        guided_json, guided_json_object, guided_regex, guided_choice, guided_grammar: the same by FastDeploy's and
            vLLM's older names.
        guided_whitespace_pattern: whitespace_pattern of guided_json and guided_json_object.
        json_schema, grammar: the same by llama.cpp's names.
        regex, ebnf: by SGLang's.
    """

    response_format: Annotated[Asked | None, Format(is_flat=False)] = None
    structured_outputs: Annotated[StructuredOutputs | None, _Outputs()] = None
    guided_json: Annotated[StructuredOutputs | None, _OneOf("json")] = None
    guided_json_object: Annotated[StructuredOutputs | None, _OneOf("json_object")] = None
    guided_regex: Annotated[StructuredOutputs | None, _OneOf("regex")] = None
    guided_choice: Annotated[StructuredOutputs | None, _OneOf("choice")] = None
    guided_grammar: Annotated[StructuredOutputs | None, _OneOf("grammar")] = None
    json_schema: Annotated[StructuredOutputs | None, _OneOf("json", unset="")] = None
    regex: Annotated[StructuredOutputs | None, _OneOf("regex", unset="")] = None
    ebnf: Annotated[StructuredOutputs | None, _OneOf("grammar", unset="")] = None
    grammar: Annotated[StructuredOutputs | None, _OneOf("grammar", unset="")] = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Annotated[None, Only("auto", "guidance", instead="there is one, guidance")] = None

    structural_tag: Annotated[None, Only("", {}, instead=_TAG)] = None

    @property
    def all_asked(self) -> list[Asked]:
        """What the fields ask for, without repetitions; more than one is a contradiction."""
        distinct: dict[str, Asked] = {}
        for asked in self._asked():
            distinct.setdefault(_as_sent(asked), asked)
        return list(distinct.values())

    def _asked(self) -> list[Asked]:
        """What every field asks for."""
        found = [Asked(name, value) for name in _FIELDS if (value := getattr(self, name)) is not None]
        if (pattern := self.guided_whitespace_pattern) is not None:
            for i, (field, outputs) in enumerate(found):
                if field.startswith(_OF_PATTERN):
                    found[i] = Asked(field, replace(outputs, whitespace_pattern=pattern))
        return below("response_format", self.response_format) + found

    def structured_faults(self, params: SamplingParams) -> list[Fault]:
        """Return what is wrong between these fields and the sampling options."""
        asked = self.all_asked
        name = "guided_whitespace_pattern"
        if self.guided_whitespace_pattern is not None and self.guided_json is None and self.guided_json_object is None:
            return [Fault(f"{name}: expected only with guided_json or guided_json_object, got neither", name)]
        if not asked:
            return []
        if len(asked) > 1:
            first, second = (one.field.partition(".")[0] for one in asked[:2])
            return [Fault(f"{second}: expected no other form than that of {first}, got another", second)]
        return [Fault(error.message, error.param) for error in against_grammar(params)]


def below(field: str, asked: Asked | None) -> list[Asked]:
    """Return what a field with an object asks for, by the whole name of the place."""
    return [] if asked is None else [Asked(field + asked.field, asked.outputs)]


def _as_sent(asked: Asked) -> str:
    """Return a text that two fields have in common when they say the same, in the same order."""
    return json.dumps(asdict(asked.outputs))


_FIELDS = ("structured_outputs", *(f"guided_{kind}" for kind in KINDS), "json_schema", "regex", "ebnf", "grammar")
_OF_PATTERN = "guided_json"
