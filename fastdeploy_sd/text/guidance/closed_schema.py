"""Closes the objects of a JSON schema: they have the members that it describes, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy_sd.text.guidance.schema_words import LISTS, MAPS, SCHEMAS

# Words that say something of an object's members.
_OF_MEMBERS = frozenset(
    ("properties", "patternProperties", "required", "minProperties", "maxProperties", "additionalProperties")
)
# Words that hold more of the same value, each once.
_BRANCHES = frozenset(("anyOf", "oneOf", "$ref"))
_ALWAYS_JOINED = frozenset(
    ("not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "propertyNames", "$dynamicRef")
)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects with `properties` have no other members, unless it says `additionalProperties`.

    Objects stay open in a schema that describes one of them in several places, as `allOf` does: what one place does
    not name another may.
    """
    result: dict[str, Any] = json.loads(json.dumps(schema))
    nodes = list(_subschemas(result))
    if not any(map(_is_joined, nodes)):
        for node in filter(_lists_its_members, nodes):
            node.setdefault("additionalProperties", False)
    return result


def _subschemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all that are objects, the whole one first. What is no schema is left for others to refuse."""
    left: list[object] = [root]
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for word, value in schema.items():
            if word in MAPS and isinstance(value, dict):
                left += value.values()
            elif word in LISTS or (word in SCHEMAS and isinstance(value, list)):
                left += value if isinstance(value, list) else ()
            elif word in SCHEMAS:
                left.append(value)


def _is_joined(schema: Mapping[str, Any]) -> bool:
    """Whether more than one place describes the members of one object."""
    all_of = schema.get("allOf", ())
    num_places = len(all_of) if isinstance(all_of, list) else 0
    num_places += len(_BRANCHES & schema.keys()) + (not _OF_MEMBERS.isdisjoint(schema))
    return num_places > 1 or not _ALWAYS_JOINED.isdisjoint(schema)


def _lists_its_members(schema: Mapping[str, Any]) -> bool:
    """Whether `properties` has all names that must be there."""
    members, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(members, dict) or not isinstance(required, list):
        return False
    least = schema.get("minProperties", 0)
    has_all = all(isinstance(name, str) and name in members for name in required)
    return has_all and (not isinstance(least, int) or least <= len(members))
