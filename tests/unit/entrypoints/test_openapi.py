"""/openapi.json is a valid description, and its schemas say of every value what the validator says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from fastdeploy_sd.entrypoints.openai.openapi import BODIES, describe
from fastdeploy_sd.entrypoints.openai.protocol import parse_body
from fastdeploy_sd.errors import BadRequest
from tests.fuzz.schema_values import SchemaValues
from tests.unit.entrypoints.scripted_app import BALANCED, ScriptedApp

LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hello"}]},
    "/api/generate": {"prompt": "hello"},
    "/infill": {"input_prefix": "hello"},
    "/api/show": {"model": "m"},
    "/v1/embeddings": {"input": "hello"},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
    "/rearrange_experts": {},
    "/get_per_expert_tokens_stats": {},
    "/check_redundant": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
# A value of every kind; a whole number with a point is an integer to JSON schema and not to the validator.
PROBES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 20, 21, 128, 129, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, 0.5, -0.5, 1.5, 2.5,
    10000000.5,
    "", "x", "none", "auto", "text", "a b", "x" * 65, "x" * 129, "x" * 257, [], {}, [1], ["x"], [""], [[1]], [[]],
    [True], [-1], ["text"], ["x"] * 17, [1] * 257, {"type": "text"}, {"type": "enabled"}, {"5": 1}, {"5": 101},
    {"x": 1}, {"a": None}, {"include_usage": True}, {"enabled": False}, {"num_speculative_tokens": 0},
    [{"role": "user"}],
    [{"role": "assistant", "content": None}], [{"role": "x", "content": "y"}],
    [{"role": "user", "content": "z", "q": 1}],
    [{"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
    [{"role": "user", "content": [{"type": "input_text", "text": "t"}], "id": "x"}], [{"type": "reasoning"}], [{}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}],
    [{"type": "reasoning", "content": [1]}],
    [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t", "annotations": []}]}],
    [{"type": "message", "role": "tool", "content": "x"}], [{"type": "item_reference", "id": "x"}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
    [{"type": "function_call", "name": "f"}], [{"type": "function_call_output", "output": "x"}],
    [{"type": "function_call_output", "call_id": "c", "output": "x"}],
    ["reasoning.encrypted_content"], ["message.output_text.logprobs"], {"effort": "low"}, {"summary": "auto"},
    {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"include_obfuscation": False}, "disabled",
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}], [{"name": "f"}],
    [{"type": "web_search"}], [{"function": {"name": "f", "parameters": {"type": "array"}}}], "required", {"name": "f"},
    {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}, {"type": "web_search"},
    [{"name": "f", "input_schema": {"type": "object"}}], [{"name": "f", "input_schema": {"type": "array"}}],
    {"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "f"}, {"type": "adaptive"}, {"type": "auto", "name": 3},
    {"type": "auto", "disable_parallel_tool_use": 3}, {"type": "enabled", "budget_tokens": 0},
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": "{}"}]}],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}]}],
    [{"role": "user", "content": [{"type": "thinking", "thinking": "t", "signature": ""}]}],
    {"num_predict": -2}, {"num_predict": -3}, {"num_ctx": 0}, {"temperature": 0.5, "stop": "x"}, {"repeat_last_n": 64},
    [{"role": "user", "content": "x", "images": ["x"]}], [{"role": "tool", "content": "x", "tool_name": "f"}], "json",
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}},
]  # fmt: skip
# Rules between fields, and one that JSON schema cannot say in the schema of a message: null content is the assistant's.
BETWEEN_FIELDS = ("expected only with", "expected either", "expected at least one message", "with it",
                  "expected exactly one message", "only the value of n", "only an assistant's", "at most max_tokens",
                  "with reasoning_max_tokens", "expected a last message that is the",
                  "expected false with messages", "metadata.",
                  "that no other function has", "expected the name of one", "with a grammar")  # fmt: skip


def validators() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(path, validator of the whole body, its schema) of each route with a body."""
    document = described()
    for path in BODIES:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        yield path, jsonschema.Draft202012Validator({**schema, "components": document["components"]}), document


def described() -> dict[str, Any]:
    document: dict[str, Any] = ScriptedApp(parallel=BALANCED).get("/openapi.json")
    return document


def fault(path: str, body: dict[str, Any]) -> str | None:
    try:
        parse_body(BODIES[path], json.dumps(body).encode())
    except BadRequest as error:
        return error.message
    return None


def test_the_document_names_the_routes_and_only_known_schemas() -> None:
    document = described()
    assert set(document["paths"]) >= {*LEAST, "/v1/models/{name}", "/health", "/metrics"}
    assert document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    text = json.dumps(document)
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert {part.split('"')[0] for part in text.split('"$ref": "')[1:]} <= known
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_docstrings_that_the_document_shows_name_what_clients_send() -> None:
    """Those of routes and bodies are text for users: a shorter docstring is a shorter document."""
    document = described()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert [operation for operation in operations if not operation.get("summary")] == []
    schemas = document["components"]["schemas"]
    whole = ("ChatMessage", "StreamOptions", "SpeculationOptions", "Reasoning", "TextOptions")
    named = {name: set(schemas[name]["properties"]) for name in whole}
    named["TokenizeBody"] = {"prompt", "messages", "add_special_tokens", "return_token_strs", "tools"}
    named |= {"DetokenizeBody": {"tokens"}, "CompletionBody": {"prompt", "echo"}}
    named["ResponseBody"] = {"input", "instructions", "include", "previous_response_id"}
    for name, fields in named.items():
        assert fields <= set(re.findall(r"\w+", schemas[name]["description"])), name


@pytest.mark.slow
def test_a_value_is_taken_exactly_where_the_schema_allows_it() -> None:
    """A field that several bodies inherit is looked at in one, unless the document says other things of it."""
    num_taken, known = 0, set[tuple[str, type, str]]()
    for path, validator, document in validators():
        schemas = document["components"]["schemas"][validator.schema["$ref"].rpartition("/")[2]]["properties"]
        for name in [*BODIES[path].model_fields, "no_such_field"]:
            owner = next((own for own in BODIES[path].__mro__ if name in vars(own).get("__annotations__", {})), None)
            if owner is not None:
                if (field := (name, owner, json.dumps(schemas.get(name)))) in known:
                    continue
                known.add(field)
            for value in PROBES:
                body = {**LEAST[path], name: value}
                told = fault(path, body)
                if told is not None and any(text in told for text in BETWEEN_FIELDS):
                    continue
                assert validator.is_valid(body) == (told is None), (path, name, value, told)
                num_taken += told is None
    assert num_taken > 1000


@pytest.mark.parametrize("seed", range(3))
def test_bodies_of_the_schema_are_taken(seed: int) -> None:
    """Random values of each field's schema, one field at a time."""
    rng = random.Random(seed)
    for path, body_type in BODIES.items():
        schema = body_type.model_json_schema()
        values = SchemaValues(schema, rng)
        for name, of_field in schema["properties"].items():
            body = {**LEAST[path], name: values.draw(of_field)}
            told = fault(path, body)
            assert told is None or any(text in told for text in BETWEEN_FIELDS), (path, body, told)


def test_the_description_is_made_of_routes() -> None:
    assert describe([])["paths"] == {}
