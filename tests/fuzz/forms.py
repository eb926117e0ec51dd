"""Makes fields that say what form an answer has: schemas, expressions, grammars, tools, predictions; small and hostile.

Some are right, some are wrong, and some ask for much in a few bytes: a server must answer each of them with what was
asked for or with a 400, and stay as quick for the others.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = ["a", "b", "name", "", "é", "a" * 300, "__proto__", "$ref", "<think>", "</think>"]
_TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
_PATTERNS = [
    "a", "[a-z]{1,20}", "(a|b)*c", "(a*)*b", "(a|a)*$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(?=a)b", "(?<!a)b", r"\1(a)",
    "(", "[", "a{1000000}", "(a{1000}){1000}", "((((((((((a?){9}){9}){9}){9}){9}){9}){9}){9}){9})", r"\p{L}+",
    "[^\\x00-\\U0010ffff]", "(?i)straße", ".*" * 200, "|".join(f"word{i}" for i in range(2000)), "\ud800",
]  # fmt: skip
_GRAMMARS = [
    'start: "a"+', "start: start", "start: a\na: b\nb: a", 'start: ("a" | "b" start)*', "start: x", "start", "", "%",
    'start: "a"{1,1000000}', "start: " + "(" * 3000, 'start: %json {"type": "object"}', "start: %json {",
    "start: @other", 'root ::= "a" [b-c]* root?', "root ::=", 'start: a{0,2147483647}\na: "x"', "%ignore /a/",
    "start: <[0-99999999]>", "start: <|im_end|>", 'start: A\nA: "x" A', "start: /(?s:.*)/ & ~/a/",
    "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "x"\nstart: r0',
    '{"grammars": [{"lark_grammar": "start: @b"}, {"name": "b", "lark_grammar": "start: @b"}]}',
]  # fmt: skip


class FormMaker:
    """Draws with a generator of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def fields(self) -> dict[str, Any]:
        """Return one or two fields of a body and their values."""
        makers = (self._response_format, self._guided, self._structured, self._tools, self._prediction, self._thinking)
        fields: dict[str, Any] = {}
        for maker in self._rng.sample(makers, self._rng.choice([1, 1, 2])):
            fields |= maker()
        return fields

    def schema(self, depth: int = 3) -> Any:
        """Return a JSON schema, or what looks like one."""
        rng = self._rng
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([{"type": rng.choice(_TYPES)}, {"enum": [1, "a", None]}, True, {}, {"const": "x" * 50}])
        kinds = (self._object, self._array, self._text, self._combined, self._referring, self._large, self._wrong)
        return rng.choice(kinds)(depth - 1)

    def _object(self, depth: int) -> Any:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0, 4))
        properties = {name: self.schema(depth) for name in names}
        required = rng.sample(names, rng.randint(0, len(names)))
        extra = rng.choice([True, False, {"type": "string"}])
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}

    def _array(self, depth: int) -> Any:
        least, most = self._rng.choice([0, 1, 10**6]), self._rng.choice([0, 3, 10**9])
        return {"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": most}

    def _text(self, depth: int) -> Any:
        limit = self._rng.choice([1, 20, 10**9])
        return {"type": "string", "pattern": self._rng.choice(_PATTERNS), "maxLength": limit}

    def _combined(self, depth: int) -> Any:
        schemas = [self.schema(depth) for _ in range(self._rng.choice([1, 3, 40]))]
        return {self._rng.choice(["anyOf", "oneOf", "allOf"]): schemas}

    def _referring(self, depth: int) -> Any:
        places = ["#", "#/$defs/a", "#/$defs/none", "http://127.0.0.1:1/x", "file:///etc/passwd"]
        return {"$ref": self._rng.choice(places), "$defs": {"a": self.schema(depth)}}

    def _large(self, depth: int) -> Any:
        rng = self._rng
        numbers = {"minimum": rng.choice([0, -(10**18), 5]), "maximum": rng.choice([3, 10**18, 1e308])}
        values = [f"value {i}" for i in range(rng.choice([2, 500, 20_000]))]
        return rng.choice([{"enum": values}, {"type": "integer", **numbers}])

    def _wrong(self, depth: int) -> Any:
        kinds = [[], "x", 1, None, {"type": "no such"}, {"not": {}}, {"if": {}, "then": {}}, {"format": "date"}]
        return self._rng.choice(kinds)

    def _response_format(self) -> dict[str, Any]:
        rng = self._rng
        named = {
            "name": rng.choice(["x", "", "a b", "n" * 65]),
            "schema": self.schema(),
            "strict": rng.choice([True, None]),
        }
        forms = [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}, {"type": "json_schema"},
                 {"type": rng.choice(["text", "xml", 1]), "json_schema": named}]  # fmt: skip
        return rng.choice(
            [{"response_format": rng.choice(forms)}, {"text": {"format": {"type": "json_schema", **named}}}]
        )

    def _guided(self) -> dict[str, Any]:
        rng = self._rng
        choices = rng.choice([["a", "b"], [], [""], ["x" * 5000], [f"choice {i}" for i in range(5000)], [1], "ab"])
        values = {
            "guided_json": rng.choice([self.schema(), "{", '{"type": "object"}']),
            "guided_regex": rng.choice(_PATTERNS),
            "guided_choice": choices,
            "guided_grammar": rng.choice(_GRAMMARS),
            "guided_json_object": rng.choice([True, False, 1]),
            "json_schema": rng.choice([self.schema(), "", {"type": "object"}]),
            "regex": rng.choice(_PATTERNS),
            "ebnf": rng.choice(_GRAMMARS),
            "response_format": {"type": "json_object", "schema": self.schema()},
        }
        return {name: values[name] for name in rng.sample(sorted(values), rng.choice([1, 1, 1, 2]))}

    def _structured(self) -> dict[str, Any]:
        outputs = {"json": self.schema(), "regex": self._rng.choice(_PATTERNS), "grammar": self._rng.choice(_GRAMMARS),
                   "json_object": True, "choice": ["a", "b"], "other": 1}  # fmt: skip
        names = self._rng.sample(sorted(outputs), self._rng.choice([1, 1, 1, 2, 0]))
        return {"structured_outputs": {name: outputs[name] for name in names}}

    def _tools(self) -> dict[str, Any]:
        rng = self._rng
        names = [rng.choice(["f", "g", "get_weather", "", "a b", "n" * 70]) for _ in range(rng.choice([1, 2, 130]))]
        tools = [{"type": "function", "function": {"name": name, "parameters": self.schema()}} for name in names]
        if rng.random() < 0.3:
            tools[0] = rng.choice(
                [{"type": "function", "name": "f", "parameters": self.schema()}, {}, {"type": "web_search"}]
            )
        named = {"type": "function", "function": {"name": rng.choice(names)}}
        choice = rng.choice(["auto", "required", "none", "any", named, {"type": "function", "name": "f"}, {}, 1])
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": rng.choice([True, False, None, "x"])}

    def _prediction(self) -> dict[str, Any]:
        texts = ["", "hello " * 20, "<|im_end|>" * 50, "\ud800", "a" * 200_000, "東" * 5000]
        text = self._rng.choice(texts)
        content: Any = self._rng.choice(
            [text, [{"type": "text", "text": text}] * self._rng.choice([1, 300]), [{}], 1, None]
        )
        return {"prediction": {"type": self._rng.choice(["content", "content", "x"]), "content": content}}

    def _thinking(self) -> dict[str, Any]:
        rng = self._rng
        values = {
            "reasoning_max_tokens": rng.choice([0, 1, 100, 2**31 - 1, 2**31, -1, 1.5]),
            "thinking_token_budget": rng.choice([0, 1, 100, -1]),
            "include": rng.choice([["message.output_text.logprobs"], ["x"], [[]], 1]),
            "include_reasoning": rng.choice([True, False, 0]),
            "separate_reasoning": rng.choice([True, False]),
            "stream_reasoning": rng.choice([True, False]),
            "reasoning_effort": rng.choice(["none", "low", "x" * 65]),
            "reasoning": rng.choice([{"effort": "low"}, {"summary": "detailed"}, {"effort": 1}]),
        }
        return {name: values[name] for name in rng.sample(sorted(values), 2)}
