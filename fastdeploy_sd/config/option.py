"""What an option is: its type, limits and text, and how any spelling of a value becomes the value.

A section (sections.py) declares its fields with `option(default, Spec(...))`; argparse flags, YAML keys, keyword
arguments and the table in docs/configuration.md are all generated from those declarations. Does not know where a value
came from, nor that there is a command line.
"""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any

from fastdeploy_sd.errors import ConfigError, shown, suggest

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NONE = frozenset({"none", "null"})
_KIND_TEXT = {int: "an integer", float: "a number", bool: "true or false", str: "a non-empty string"}


@dataclass(frozen=True, slots=True)
class Spec:
    """Text and limits of one option.

    Attributes:
        help: one or two sentences for --help and the documentation; units named.
        name: what users write, when it differs from the field's name.
        choices: the only accepted values; taken from the field's type when that is a Literal.
        instead: values of others that are refused, and what to use.
        minimum, maximum: inclusive limits of a number.
        secret: never printed, logged or serialised unless asked for.
        comma_separated: a text of a list holds several values, with commas between them; a number is a list of one.
        takes_json_lists: a text of a list may be several values as a JSON list, as vLLM has them.
        read_item: makes an item of a list of a text or a map; a list may also be a JSON list. None = items are texts.
        read_map: makes the value of a map, of its JSON text and of what an earlier reading made of one; None = the
            option is no map.
        default_text: what the documentation shows as the default, where that depends on other options.
    """

    help: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[object, ...] = ()
    instead: tuple[tuple[str, str], ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    default_text: str = ""
    comma_separated: bool = False
    takes_json_lists: bool = False
    read_item: Callable[[object], Any] | None = None
    read_map: Callable[[object], Any] | None = None


def option(default: object, spec: Spec) -> Any:
    """Return a dataclass field that is also an option; `default=MISSING` makes it a required one."""
    return field(default=default, repr=not spec.secret, metadata={"option": spec})


@dataclass(frozen=True, slots=True)
class Option:
    """One option, resolved from its declaration.

    Attributes:
        name: with underscores, as in YAML; the flag is `--` and the name with dashes.
        section: attribute of Config that holds it, "" = Config itself.
        kind: int, float, bool, str, or tuple for a list.
        item_kind: what a list holds: str or int.
        group: the option whose map holds this one as a key, "" = none does. A section says so in `option_group`.
    """

    name: str
    section: str
    field_name: str
    kind: type
    is_optional: bool
    default: object
    choices: tuple[object, ...]
    spec: Spec
    group: str = ""
    item_kind: type = str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def path(self) -> str:
        """The name, after that of the option it is a key of."""
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def expected(self) -> str:
        """What a valid value looks like, for error texts and the documentation."""
        if self.spec.comma_separated:
            of = ", ".join(map(str, self.choices)) or _KIND_TEXT[self.item_kind] + _limits_text(self.spec)
            text = f"{of}, or a list of them" + (", or none" if self.default == () else "")
        elif self.choices:
            text = "one of " + ", ".join(str(c) for c in self.choices)
        elif self.kind is tuple:
            text = "a non-empty string or a list of them"
        elif is_dataclass(self.kind):
            text = "a map"
        else:
            text = _KIND_TEXT[self.kind] + _limits_text(self.spec)
        if self.spec.read_map is not None and not is_dataclass(self.kind):
            text += ", a map"
        if not self.is_optional:
            return text
        return f"{text}, or {'null' if 'none' in self.choices else 'none'}"

    def convert(self, value: object) -> Any:
        """Return `value` as this option's type; text is parsed as on a command line.

        Raises ConfigError: the value has another type, is out of its limits or not one of the choices.
        """
        if self.is_optional and (value is None or self._means_none(value)):
            return None
        if self.spec.read_map is not None and _is_map(value):
            return self.spec.read_map(value)
        if is_dataclass(self.kind):
            raise self.error(value)
        if self.spec.read_item is not None:
            return tuple(self.spec.read_item(item) for item in self._items(value))
        try:
            if self.spec.comma_separated:
                return tuple(self._within_limits(_PARSERS[self.item_kind](item)) for item in _items(value))
            if self.spec.takes_json_lists:
                value = _without_json_lists(value)
            return self._within_limits(_PARSERS[self.kind](value))
        except (ValueError, OverflowError):
            raise self.error(value) from None

    def _items(self, value: object) -> list[object]:
        try:  # of a list, of JSON lists among its texts too, or of one item alone
            found = _without_json_lists([value] if isinstance(value, str | Mapping) else value or [])
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list):
            raise self.error(value)
        return found

    def _within_limits(self, result: Any) -> Any:
        """Return a parsed value, or an item of a list, that is allowed. Raises ValueError."""
        if self.choices and result not in self.choices:
            raise ValueError
        too_small = self.spec.minimum is not None and result < self.spec.minimum
        if too_small or (self.spec.maximum is not None and result > self.spec.maximum):
            raise ValueError
        return result

    def error(self, value: object) -> ConfigError:
        """Return the error for `value`, which is not repeated when the option is secret."""
        got = "(hidden)" if self.spec.secret else shown(value)
        hint = ""
        if isinstance(value, str):
            known = dict(self.spec.instead).get(value)
            hint = suggest(value, map(str, self.choices)) if known is None else f": {known}"
        return ConfigError(f"{self.path}: expected {self.expected}, got {got}{hint}", param=self.group or self.name)

    def _means_none(self, value: object) -> bool:
        """A free text may well be "none", and so may a choice; for everything else the word is the value None."""
        is_text = self.kind is str and (not self.choices or value in self.choices)
        return not is_text and isinstance(value, str) and value.strip().lower() in _NONE


@functools.cache
def options_of(cls: type, section: str) -> tuple[Option, ...]:
    """Return the options a section's dataclass declares, in order."""
    hints = typing.get_type_hints(cls)
    group = getattr(cls, "option_group", "")
    return tuple(_resolve(f, hints[f.name], section, group) for f in fields(cls) if "option" in f.metadata)


def verify_fields(section: Any, name: str) -> None:
    """Raise ConfigError when a field of a constructed section is not a value its option allows (text is not parsed)."""
    for opt in options_of(section.__class__, name):
        value = getattr(section, opt.field_name)
        converted = opt.convert(value)
        if converted != value or isinstance(converted, str | bool) is not isinstance(value, str | bool):
            raise opt.error(value)


def wrong_value(name: str, expected: str, got: object) -> ConfigError:
    """Return the error of an option whose value is none of the expected ones."""
    return ConfigError(f"{name}: expected {expected}, got {got}", param=name)


def _resolve(declared: Field[Any], hint: Any, section: str, group: str) -> Option:
    spec: Spec = declared.metadata["option"]
    args = typing.get_args(hint) if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    inner = next(a for a in args if a is not NoneType)
    choices = spec.choices
    if typing.get_origin(inner) is typing.Literal:
        choices = typing.get_args(inner)
        inner = type(choices[0])
    return Option(
        name=spec.name or declared.name,
        section=section,
        field_name=declared.name,
        kind=typing.get_origin(inner) or inner,
        is_optional=NoneType in args,
        default=declared.default,
        choices=choices,
        spec=spec,
        group=group,
        item_kind=next(iter(typing.get_args(inner)), str) if typing.get_origin(inner) is tuple else str,
    )


def _is_map(value: object) -> bool:
    is_json = isinstance(value, str) and value.lstrip().startswith("{")
    return is_json or isinstance(value, Mapping) or is_dataclass(value)


def _limits_text(spec: Spec) -> str:
    low, high = spec.minimum, spec.maximum
    if low is not None and high is not None:
        return f" in {low}..{high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"


def _items(value: object) -> list[object]:
    """The items of a list with commas: of a text, of texts (a repeated flag), of numbers, or none at all."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
        return []
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [item for part in value for item in _items_of(part)]
    return _items_of(value)


def _without_json_lists(value: object) -> object:
    """The values of a list of which some are JSON lists of values."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        return value
    lists = (json.loads(item) if isinstance(item, str) and item.startswith("[") else [item] for item in items)
    return [item for items in lists for item in items]


def _items_of(part: object) -> list[object]:
    return [item.strip() for item in part.split(",")] if isinstance(part, str) else [part]


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _parse_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def _parse_str(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _parse_strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) and item for item in items):
        raise ValueError
    return tuple(items)


_PARSERS: dict[type, Any] = {
    int: _parse_int,
    float: _parse_float,
    bool: _parse_bool,
    str: _parse_str,
    tuple: _parse_strings,
}
