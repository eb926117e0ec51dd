"""Fields of a checkpoint's JSON files: their types and ranges, and a reader that checks both.

A value that is null counts as absent, as in the files' own library. Knows no file's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown

MAX_I32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `low` to `high`; `default` None = the key is required."""

    low: int
    high: int
    default: int | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`, integer or not; `default` None = the key is required."""

    low: float
    high: float
    default: float | None = None


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    default: bool | None = False


Field = Integer | Number | Boolean


class FieldReader:
    """Typed access to a JSON object. Every method raises CheckpointError with the key that is missing or wrong.

    Args:
        where: begins every error: the file, or the file and the key that holds the object.
        defaults: what an absent key means in these files, where that is not the field's own default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        fields: Mapping[str, Field],
        where: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.values, self.where = values, where
        self._fields, self._defaults = fields, defaults or {}

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer; `default` is for one that depends on other keys."""
        field = self._fields[name]
        assert isinstance(field, Integer)
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not field.low <= value <= field.high:
            raise self.error(name, f"an integer from {field.low} to {field.high}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; `default` as in `integer`."""
        field = self._fields[name]
        assert isinstance(field, Number)
        value = self._get(name, default)
        # Compared before it is converted: an integer of 400 digits is no float at all. NaN compares as false.
        if isinstance(value, bool) or not isinstance(value, int | float) or not field.low <= value <= field.high:
            raise self.error(name, f"a number from {field.low:g} to {field.high:g}", value)
        return float(value)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer, None where the key is null; `default` is for a key that is absent."""
        return None if self.values.get(name, default) is None else self.integer(name, default)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a number, None where the key is null; `default` is for a key that is absent."""
        return None if self.values.get(name, default) is None else self.number(name, default)

    def boolean(self, name: str) -> bool:
        """Return true or false."""
        value = self._get(name, None)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def require_neutral(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse values that ask for a computation that is not supported: others than those of each key."""
        for name, allowed in neutral.items():
            value = self.values.get(name)
            if value is not None and value not in allowed:
                expected = " or ".join(map(shown, allowed)) or "no such key"
                raise self.error(name, f"{expected} (nothing else is supported)", value)

    def replaced(self, **values: Any) -> FieldReader:
        """Return a reader of the same object with other values of these keys."""
        return FieldReader({**self.values, **values}, self._fields, self.where, self._defaults)

    def nested(self, name: str) -> FieldReader:
        """Return a reader of the object under a key."""
        values = self.values.get(name)
        if not isinstance(values, Mapping):
            raise self.error(name, "a map", values)
        return FieldReader(values, self._fields, f"{self.where}: {name}", self._defaults)

    def error(self, name: str, expected: str, value: object) -> CheckpointError:
        got = "nothing" if value is None else shown(value)
        return CheckpointError(f"{self.where}: {name}: expected {expected}, got {got}")

    def _get(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            value = self._defaults.get(name, default)
        return self._fields[name].default if value is None else value


def is_token_id(value: object) -> bool:
    """Whether a JSON value can be a token's number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_I32
