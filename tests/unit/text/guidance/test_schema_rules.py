"""What is refused of a JSON schema before the library sees it, and that what clients send is not."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd.text.guidance.schema_rules import check_schema

LOOP = {"$ref": "#/$defs/a"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
TREE = {"type": "object", "properties": {"inner": {"type": "array", "items": {"$ref": "#"}}}, "required": ["inner"]}


def chain(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        TREE,
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/a~1b~0%20c", "$defs": {"a/b~ c": {"type": ["string", "null"], "maxLength": 3}}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 0, "exclusiveMinimum": True},
        {"type": "number", "minimum": -(2**53), "maximum": 2**53, "multipleOf": 0.01},
        {"properties": {"$ref": {"type": "string"}, "multipleOf": {"const": -1}}},
        {"enum": [{"$ref": 1, "type": 3}]},
        {"required": ["a", "a"], "minProperties": 1},
        chain(400),
        {"properties": {str(i): {} for i in range(2000)}, "required": [str(i) for i in range(1000)]},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
        {"$ref": "#/$defs/a/items/items", "$defs": {"a": {"items": {"items": {"type": "null"}}}}},
    ],
)
def test_schemas_that_may_pass(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], ": expected a schema (an object, true or false), got []"),
        ({"properties": {"a/b": 1}}, "/properties/a~1b: expected a schema (an object, true or false), got 1"),
        (
            {"type": "text"},
            "/type: expected one of array, boolean, integer, null, number, object, string, or a list of",
        ),
        ({"type": []}, "/type: expected one of "),
        ({"$defs": {"a": {"minimum": "1"}}}, "/$defs/a/minimum: expected a number between -9007199254740992 and "),
        ({"maximum": 10**20}, "/maximum: expected a number between"),
        ({"maximum": float("inf")}, "/maximum: expected a number between"),
        ({"minLength": -1}, "/minLength: expected an integer of at least 0, got -1"),
        ({"maxItems": True}, "/maxItems: expected an integer of at least 0, got true"),
        ({"required": "a"}, "/required: expected a list of strings, got 'a'"),
        ({"anyOf": []}, "/anyOf: expected a list of schemas that is not empty"),
        ({"enum": []}, "/enum: expected a list that is not empty"),
        ({"multipleOf": 0}, "/multipleOf: expected a number greater than 0, got 0"),
        ({"multipleOf": 999983}, "/multipleOf: expected numbers whose least common multiple"),
        ({"multipleOf": 1e9}, "/multipleOf: expected numbers whose least common multiple"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "/multipleOf: expected numbers whose least"),
        ({"$ref": "http://a/b"}, '/$ref: expected a place in this schema ("#" or "#/..."), got '),
        ({"$ref": "#/a"}, "/$ref: expected a place that is in this schema, got '#/a'"),
        ({"$ref": "#/$schema", "$schema": "x"}, "/$schema: expected a schema (an object, true or false), got "),
        ({"items": {"$id": "http://a/b"}}, "/items/$id: expected $id nowhere but at the top of a schema"),
        ({"items": {"x-guidance": {"lenient": True}}}, "/items/x-guidance: not supported"),
        ({"minProperties": 1}, "/minProperties: expected at most as many as `required` has"),
        ({"$defs": {"a": LOOP}}, "/$defs/a: expected a schema that comes to an end, got references in a circle"),
        ({"properties": {"b": LOOP}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": LOOP}}, "expected a schema that comes"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ": expected a schema that comes to an end"),
        (
            {"items": {"exclusiveMinimum": 0, "maximum": 0.5}},
            "/items: expected no exclusive whole bound with the other",
        ),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ": expected no exclusive whole bound"),
        ({"exclusiveMinimum": True, "minimum": 1, "maximum": 1.5}, ": expected no exclusive whole bound"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ": expected no exclusive whole bound"),
        ({"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"exclusiveMinimum": 0}}}, ": expected no exclusive"),
        (NODE, ": expected a schema that comes to an end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ": expected a schema that comes to an end"),
        (chain(1001), ": expected at most 1000 levels"),
        (
            {"items": {"properties": {str(i): {} for i in range(1002)}, "required": ["0"]}},
            "/items/properties: expected at most 1000 properties that are not required, got 1001",
        ),
        ({"allOf": [{}] * 10_001}, "expected at most 10000 subschemas, got more"),
    ],
)
def test_schemas_that_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"expected|not supported") as caught:
        check_schema(schema)
    assert message in str(caught.value)
