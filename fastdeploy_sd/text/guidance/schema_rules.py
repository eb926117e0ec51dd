"""Validates a JSON schema before the grammar library compiles it.

The library refuses unknown words. Refused here is what it takes and must not: words of the wrong kind, bounds that it
does not hold exactly, references that never come to a value, and what costs it time, memory or its stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from fastdeploy_sd.errors import shown
from fastdeploy_sd.text.guidance.schema_words import (
    EXPECTED,
    LISTS,
    MAPS,
    SCHEMAS,
    anything,
    bounds_of,
    has_constraints,
)

MAX_SUBSCHEMAS = 10_000
# The library recurses into what a reference names. Its stack overflows at some 2,000 levels.
MAX_LEVELS = 1_000
# The library makes as many states for a number, and looks at them all.
MAX_MULTIPLE = 10_000
# The library follows all that may come next at the same time; see SCHEMA_LIMITS.
MAX_OPTIONAL = 1_000


def check_schema(schema: object) -> None:
    """Refuse a schema that the library must not get, by ValueError "<JSON pointer>: expected ..., got ..."."""
    nodes = _Nodes(schema)
    nodes.read()
    nodes.check_levels()
    nodes.check_multiples()
    nodes.check_bounds()
    nodes.check_ends()


class _Nodes:
    """The subschemas of a schema, by place: their JSON pointers."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._schemas: dict[str, Any] = {}
        self._inner: dict[str, list[str]] = {}  # the subschemas that one holds
        self._targets: dict[str, str] = {}  # a subschema with a reference -> the place it names
        self._multiples: dict[str, int] = {}
        self._to_read: list[tuple[str, object]] = [("", root)]

    def read(self) -> None:
        """Check every word of every subschema."""
        while self._to_read:
            place, schema = self._to_read.pop()
            if place in self._schemas:
                continue
            self._schemas[place] = schema
            self._inner[place] = []
            if len(self._schemas) > MAX_SUBSCHEMAS:
                raise ValueError(f"{place}: expected at most {MAX_SUBSCHEMAS} subschemas, got more")
            if isinstance(schema, dict):
                self._read_words(place, schema)
            elif not isinstance(schema, bool):
                raise _wrong(place, "a schema (an object, true or false)", schema)

    def _read_words(self, place: str, schema: dict[str, Any]) -> None:
        for word, value in schema.items():
            here = f"{place}/{_escaped(word)}"
            expected, is_right = EXPECTED.get(word, ("", anything))
            if not is_right(value):
                raise _wrong(here, expected, value)
            if word in MAPS:
                self._enter(place, {f"{here}/{_escaped(name)}": inner for name, inner in value.items()})
            elif word in LISTS or (word == "items" and isinstance(value, list)):
                self._enter(place, {f"{here}/{i}": inner for i, inner in enumerate(value)})
            elif word in SCHEMAS:
                self._enter(place, {here: value})
            elif word == "$ref":
                self._targets[place] = value[1:]
                self._to_read.append((value[1:], self._resolve(here, value)))
            elif word == "multipleOf":
                self._multiples[here] = _states(value)
            elif word in ("$id", "id") and place:
                raise ValueError(f"{here}: expected {word} nowhere but at the top of a schema")
            elif word == "x-guidance":
                raise ValueError(f"{here}: not supported")
        _check_number_of_names(place, schema)
        _check_optional_names(place, schema)

    def _enter(self, place: str, inner: Mapping[str, object]) -> None:
        self._inner[place] += inner
        self._to_read += inner.items()

    def _resolve(self, here: str, reference: str) -> object:
        found: object = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name in map(str, range(len(found))):
                found = found[int(name)]
            else:
                raise _wrong(here, "a place that is in this schema", reference)
        return found

    def check_levels(self) -> None:
        """Bound how deep the library can recurse: into each place that is referred to once, and to its deepest."""
        levels: dict[str, int] = {}
        for place in sorted(self._schemas, key=len, reverse=True):  # what is inside has the longer pointer
            levels[place] = 1 + max((levels[inner] for inner in self._inner[place]), default=0)
        if sum(levels[place] for place in {"", *self._targets.values()}) > MAX_LEVELS:
            raise ValueError(
                f": expected at most {MAX_LEVELS} levels, counted in each subschema that is referred to, got more"
            )

    def check_multiples(self) -> None:
        """Bound the states of multipleOf; two of them may come to hold for one number."""
        multiple = 1
        for here, states in self._multiples.items():
            multiple = math.lcm(multiple, states)
            if multiple > MAX_MULTIPLE:
                raise ValueError(
                    f"{here}: expected numbers whose least common multiple in the schema, without decimal point, is at"
                    f" most {MAX_MULTIPLE}, got more"
                )

    def check_bounds(self) -> None:
        """Refuse an exclusive whole bound with the other one less than 1 away, which the library takes for allowed.

        Bounds of several subschemas are taken together where one may say more of another's value.
        """
        schemas = {place: schema for place, schema in self._schemas.items() if isinstance(schema, dict)}
        groups = [[place] for place in schemas]
        if any(has_constraints(schema) for schema in schemas.values()):
            groups = [list(schemas)]
        for group in groups:
            lows = [bound for place in group for bound in bounds_of(schemas[place], "inimum")]
            highs = [bound for place in group for bound in bounds_of(schemas[place], "aximum")]
            from_above = {math.floor(high) for high, _ in highs if not float(high).is_integer()}
            from_below = {math.ceil(low) for low, _ in lows if not float(low).is_integer()}
            taken_in = {low for low, is_exclusive in lows if is_exclusive} & from_above
            taken_in |= {high for high, is_exclusive in highs if is_exclusive} & from_below
            if taken_in:
                raise ValueError(
                    f"{group[0] if len(group) == 1 else ''}: expected no exclusive whole bound with the other bound"
                    f" less than 1 away, got {min(taken_in)}"
                )

    def check_ends(self) -> None:
        """Refuse references in a circle: back to the same value, or on to values without end."""
        comes_to_words = _reached({place: (self._same_value(place), False) for place in self._schemas})
        is_finite = _reached(self._needs_for_an_end())
        circle = next((place for place in self._schemas if place not in comes_to_words & is_finite), None)
        if circle is not None:
            raise ValueError(f"{circle}: expected a schema that comes to an end, got references in a circle")

    def _same_value(self, place: str) -> list[str]:
        """The places that say more of the same value."""
        words = tuple(f"{place}/{word}/" for word in ("allOf", "anyOf", "oneOf"))
        others = [inner for inner in self._inner[place] if inner.startswith(words)]
        return [*others, self._targets[place]] if place in self._targets else others

    def _needs_for_an_end(self) -> _Needs:
        """For a finite value to fit here, where must one fit?"""
        needs: _Needs = {}
        for place, schema in self._schemas.items():
            all_of = [self._targets[place]] if place in self._targets else []
            if isinstance(schema, dict):
                all_of += [f"{place}/allOf/{i}" for i in range(len(schema.get("allOf", ())))]
                for word in ("anyOf", "oneOf"):
                    if word in schema:
                        all_of.append(f"{place}/{word}")
                        needs[all_of[-1]] = [f"{place}/{word}/{i}" for i in range(len(schema[word]))], True
                all_of += self._needed_members(place, schema)
            needs[place] = all_of, False
        return needs

    def _needed_members(self, place: str, schema: Mapping[str, Any]) -> list[str]:
        if schema.get("type") == "object":
            names = dict.fromkeys(schema.get("required", ()))
            return [f"{place}/properties/{_escaped(name)}" for name in names if name in schema.get("properties", ())]
        if schema.get("type") == "array":
            least, num_first = schema.get("minItems", 0), len(schema.get("prefixItems", ()))
            first = [f"{place}/prefixItems/{i}" for i in range(min(least, num_first))]
            others = f"{place}/items"
            return [*first, others] if least > num_first and others in self._schemas else first
        return []


# Place -> the places that it needs, and whether one of them is enough.
_Needs = dict[str, tuple[list[str], bool]]


def _reached(needs: _Needs) -> set[str]:
    """The places that have what they need, in time linear in the needs."""
    users: dict[str, list[str]] = {}
    for place, (others, _) in needs.items():
        for other in others:
            users.setdefault(other, []).append(place)
    missing = {place: 1 if is_any else len(others) for place, (others, is_any) in needs.items()}
    reached: set[str] = set()
    new = [place for place, count in missing.items() if count == 0]
    while new:
        place = new.pop()
        if place in reached:
            continue
        reached.add(place)
        for user in users.get(place, ()):
            missing[user] -= 1
            if missing[user] == 0:
                new.append(user)
    return reached


def _check_number_of_names(place: str, schema: Mapping[str, Any]) -> None:
    """Refuse a least number of names where some are free: an answer may write one of those twice."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if least > len(set(required)) and schema.get("additionalProperties") is not False:
        raise ValueError(
            f"{place}/minProperties: expected at most as many as `required` has, or additionalProperties: false, got"
            f" {least}"
        )


def _check_optional_names(place: str, schema: Mapping[str, Any]) -> None:
    num_optional = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
    if num_optional > MAX_OPTIONAL:
        raise ValueError(
            f"{place}/properties: expected at most {MAX_OPTIONAL} properties that are not required, got {num_optional}"
        )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _states(multiple: float) -> int:
    """How many remainders the library tells apart for a multipleOf."""
    _, digits, exponent = Decimal(str(multiple)).normalize().as_tuple()
    assert isinstance(exponent, int)
    if max(exponent, 0) + len(digits) > len(str(MAX_MULTIPLE)):
        return MAX_MULTIPLE + 1
    coefficient = int("".join(map(str, digits)))
    scale: int = 10 ** max(exponent, 0)
    return coefficient * scale


def _wrong(here: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{here}: expected {expected}, got {shown(value)}")
