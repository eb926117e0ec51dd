"""Random values that a JSON schema allows, with a liking for its edges. Knows the words of the bodies' schemas."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

_TEXTS = [
    "",
    "a",
    "5",
    "hello",
    "def f(x):\n    return",
    "Zürich 東京 🙂",
    " ",
    "<|im_end|>",
    "\x00",
    "a" * 300,
    "id-1.2",
]
_SCALARS: list[Any] = [None, True, False, 0, -1, 1.5, "x", [], {}]
_MAX_ITEMS = 3
_WIDE = 1 << 40


class SchemaValues:
    """Draws values.

    Args:
        schema: of the whole, whose `$defs` are referred to.
        rng: decides.
    """

    def __init__(self, schema: Mapping[str, Any], rng: random.Random) -> None:
        self._definitions = schema.get("$defs", {})
        self._rng = rng

    def draw(self, schema: Mapping[str, Any]) -> Any:
        """Return a value that `schema` allows.

        Raises:
            NotImplementedError: it uses a word that no body's schema has used so far.
        """
        if "$ref" in schema:
            return self.draw(self._definitions[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return self.draw(self._rng.choice(schema["anyOf"]))
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        kind = schema.get("type", "anything")
        if isinstance(kind, list):
            kind = self._rng.choice(kind)
        return getattr(self, f"_{kind}")(schema)

    def _anything(self, _: Mapping[str, Any]) -> Any:
        return self._rng.choice(_SCALARS)

    def _null(self, _: Mapping[str, Any]) -> None:
        return None

    def _boolean(self, _: Mapping[str, Any]) -> bool:
        return self._rng.random() < 0.5

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low, high = int(schema.get("minimum", -_WIDE)), int(schema.get("maximum", _WIDE))
        return self._rng.choice([low, high, min(low + 1, high), self._rng.randint(low, high)])

    def _number(self, schema: Mapping[str, Any]) -> float:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e300)), schema.get("maximum", 1e300)
        drawn = self._rng.uniform(low, high)
        edges = [high, drawn] if "exclusiveMinimum" in schema else [low, high, drawn]
        return float(self._rng.choice(edges))

    def _string(self, schema: Mapping[str, Any]) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength", 1 << 20)
        pattern = re.compile(schema.get("pattern", ""))
        return self._rng.choice([text for text in _TEXTS if low <= len(text) <= high and pattern.search(text)])

    def _array(self, schema: Mapping[str, Any]) -> list[Any]:
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", _MAX_ITEMS), max(low, _MAX_ITEMS))
        return [self.draw(schema.get("items", {})) for _ in range(self._rng.randint(low, high))]

    def _object(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        names = [name for name in properties if name in required or self._rng.random() < 0.5]
        drawn = {name: self.draw(properties[name]) for name in names}
        other = schema.get("additionalProperties", True)
        if other is not False:
            names = [self._string(schema.get("propertyNames", {})) for _ in range(self._rng.randint(0, _MAX_ITEMS))]
            drawn |= {name: self.draw({} if other is True else other) for name in names if name not in properties}
        return drawn
