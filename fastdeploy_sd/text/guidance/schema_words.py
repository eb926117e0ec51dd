"""The words of a JSON schema: what each must be, and what several of them mean together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

# Beyond, the library's floating-point numbers leave integers out.
MAX_BOUND = 2**53
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties", "additionalItems")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def bounds_of(schema: Mapping[str, Any], end: str) -> list[tuple[float, bool]]:
    """The bounds of a schema to one side, and whether each is exclusive."""
    inclusive, exclusive = schema.get(f"m{end}"), schema.get(f"exclusiveM{end}")
    if isinstance(exclusive, bool):  # draft 4
        return [] if inclusive is None else [(inclusive, exclusive)]
    return [
        (value, is_exclusive) for value, is_exclusive in ((inclusive, False), (exclusive, True)) if value is not None
    ]


def has_constraints(schema: Mapping[str, Any]) -> bool:
    """Whether several subschemas describe one value."""
    others = schema.keys() & EXPECTED.keys() - {"$schema", "$id", "$defs", "definitions"}
    return not schema.keys().isdisjoint(("allOf", "patternProperties")) or (
        not others.isdisjoint(("$ref", "anyOf", "oneOf")) and len(others) > 1
    )


def anything(_: object) -> bool:
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_bound(value: Any) -> bool:
    return _is_number(value) and abs(value) <= MAX_BOUND


def _is_exclusive_bound(value: object) -> bool:
    return isinstance(value, bool) or _is_bound(value)  # draft 4 has true and false


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_filled_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: object) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(name, str) and name in _TYPES for name in types)


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and (value == "#" or value.startswith("#/"))


_COUNT = ("an integer of at least 0", _is_count)
_BOUND = (f"a number between -{MAX_BOUND} and {MAX_BOUND}", _is_bound)
_EXCLUSIVE_BOUND = (_BOUND[0], _is_exclusive_bound)
_MAP: tuple[str, Callable[[Any], bool]] = ("an object of schemas", lambda value: isinstance(value, dict))
_TEXT: tuple[str, Callable[[Any], bool]] = ("a string", lambda value: isinstance(value, str))
# Word -> what it must be, in words and as a rule.
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(MAPS, _MAP),
    **dict.fromkeys(LISTS, ("a list of schemas that is not empty", _is_filled_list)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _BOUND),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _EXCLUSIVE_BOUND),
    **dict.fromkeys(("pattern", "format", "$schema", "$id", "$anchor"), _TEXT),
    "multipleOf": ("a number greater than 0", lambda value: _is_number(value) and value > 0),
    "enum": ("a list that is not empty", _is_filled_list),
    "required": ("a list of strings", _is_names),
    "type": ("one of " + ", ".join(_TYPES) + ", or a list of them", _is_type),
    "$ref": ('a place in this schema ("#" or "#/...")', _is_reference),
}
