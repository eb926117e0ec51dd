"""Splits a command line into flags and their values, and shows --help.

Every fault becomes one of many: nothing stops the reading. Whether a name is known here only decides whether it takes a
value; what the values mean is the options' business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.config.catalogue import BY_NAME, canonical_name
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.no_effect import NO_EFFECT
from fastdeploy_sd.config.option import Option
from fastdeploy_sd.config.unsupported import UNSUPPORTED
from fastdeploy_sd.errors import ConfigError, shown, suggest

COMMAND_LINE = "command line"
_FLAG = re.compile(r"--|-[A-Za-z]")
_TRUTH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})
_NO = "no_"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a command line, or a word that is none.

    Attributes:
        name: the option's, with aliases resolved; "" for a word that belongs to no flag.
        value: the text after it; True or False for a flag without one.
        index: which argument it is.
    """

    name: str
    value: str | bool
    index: int


def split_flags(
    argv: Sequence[str],
    canonical: Callable[[str], str] = canonical_name,
    is_switch: Callable[[str], bool] | None = None,
) -> Iterator[Flag]:
    """Yield the flags of a command line in order.

    Dashes and underscores are the same in a flag; `--flag value` and `--flag=value` too. A first word that is no flag
    is the model, as in `serve MODEL`. `is_switch`: whether an option needs no value; None = as a server's options.
    """
    is_switch = is_switch or _is_switch
    position = 0
    while position < len(argv):
        word, index = argv[position], position
        position += 1
        if not _FLAG.match(word):
            yield Flag("model" if index == 0 else "", word, index)
            continue
        written, equals, value = word.partition("=")
        name = canonical(written.lstrip("-"))
        if equals:
            yield Flag(name, value, index)
        elif position < len(argv) and _takes(name, argv[position], is_switch):
            yield Flag(name, argv[position], index)
            position += 1
            while position < len(argv) and _is_list(name) and not _FLAG.match(argv[position]):
                yield Flag(name, argv[position], position)
                position += 1
        else:
            yield _without_value(name, index, is_switch)


def read_flags(argv: Sequence[str], options: Sequence[Option], whose: str, faults: Faults) -> dict[str, Any]:
    """Return name -> value of the options of another command than a server's; what is wrong goes to `faults`.

    Args:
        whose: begins the text of a fault, as in "a router's".
    """
    by_name, values = {opt.name: opt for opt in options}, dict[str, Any]()
    aliases = {alias: opt.name for opt in options for alias in opt.spec.aliases}

    def canonical(written: str) -> str:
        name = written.replace("-", "_")
        return aliases.get(name, name)

    for flag in split_flags(argv, canonical, lambda name: name in by_name and by_name[name].kind is bool):
        with faults.collecting((0, flag.index), COMMAND_LINE):
            opt = by_name.get(flag.name)
            if opt is None:
                if not flag.name or flag.name == "model":
                    raise ConfigError(
                        f"command line: expected {whose} flags only, got {shown(flag.name or flag.value)}"
                    )
                raise ConfigError(f"{flag.name}: unknown option{suggest(flag.name, by_name)}", param=flag.name)
            if opt.kind is not bool and isinstance(flag.value, bool):
                raise ConfigError(f"{flag.name}: expected {opt.expected}, got nothing", param=flag.name)
            value = opt.convert(flag.value)
            values[flag.name] = (*values.get(flag.name, ()), *value) if opt.kind is tuple else value
    return values


def _without_value(name: str, index: int, is_switch: Callable[[str], bool]) -> Flag:
    positive = name.removeprefix(_NO)
    is_negation = name.startswith(_NO) and (is_switch(positive) or positive in UNSUPPORTED)
    return Flag(positive, False, index) if is_negation else Flag(name, True, index)


def _takes(name: str, word: str, is_switch: Callable[[str], bool]) -> bool:
    """Whether the word after a flag is its value: never another flag, and of a switch only a word like "true"."""
    if _FLAG.match(word) or name.startswith(_NO):
        return False
    return word.lower() in _TRUTH_WORDS if is_switch(name) else True


def _is_list(name: str) -> bool:
    """Whether all words after a flag are its values, as vLLM has it."""
    opt = BY_NAME.get(name)
    return opt is not None and opt.spec.read_item is not None


def _is_switch(name: str) -> bool:
    opt = BY_NAME.get(name) or NO_EFFECT.get(name)
    return opt is not None and opt.kind is bool
