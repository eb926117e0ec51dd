"""Reads option values from a command line, a YAML file or keyword arguments, each with its origin.

Unknown names and what cannot be read at all are faults here; what the values must be is not looked at, so that a value
that another one overrides is no fault. Does not know sections or rules between options.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastdeploy_sd.config.aliases import advice
from fastdeploy_sd.config.catalogue import BY_NAME, KNOWN_NAMES, MODELS_OPTION, canonical_name
from fastdeploy_sd.config.command_line import COMMAND_LINE, Flag, split_flags
from fastdeploy_sd.config.faults import Faults, Position
from fastdeploy_sd.config.help_text import help_text
from fastdeploy_sd.config.no_effect import NO_EFFECT
from fastdeploy_sd.config.speculative import SPECULATIVE_OPTION
from fastdeploy_sd.config.unsupported import UNSUPPORTED
from fastdeploy_sd.errors import ConfigError, shown, suggest

CONFIG_OPTION = "config"
_HELP = frozenset({"-h", "--help"})
_ALL_NAMES = (*KNOWN_NAMES, *UNSUPPORTED, *NO_EFFECT, CONFIG_OPTION)
# Sources in the order in which their faults are reported.
_FILE, _ARGUMENTS = 0, 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written, and where."""

    value: object
    origin: str
    position: Position


Settings = dict[str, Setting]


def read_command_line(argv: Sequence[str], prog: str, description: str, faults: Faults) -> Settings:
    """Return the settings of `argv` over those of the YAML file it names with --config.

    A flag that is repeated counts the last time; values of a list are collected. Raises SystemExit: --help was given
    (0).
    """
    if not _HELP.isdisjoint(argv):
        print(help_text(prog, description), end="")
        raise SystemExit(0)
    settings: Settings = {}
    for flag in split_flags(argv):
        position = (_ARGUMENTS, flag.index)
        with faults.collecting(position, COMMAND_LINE):
            _verify_flag(flag)
            settings[flag.name] = Setting(_value(flag, settings), COMMAND_LINE, position)
    file = settings.pop(CONFIG_OPTION, None)
    return settings if file is None else read_yaml(Path(str(file.value)), faults) | settings


def read_yaml(path: Path, faults: Faults) -> Settings:
    """Return the settings of a YAML file: one map of option names to values."""
    try:
        loader = _StrictLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            faults.add(ConfigError(f"config: expected a map of options in {path}, got something else", param="config"))
            return {}
        entries = [(loader.construct_object(k, True), loader.construct_object(v, True), k) for k, v in node.value]
    except OSError as error:
        faults.add(_file_error(f"expected a readable YAML file, got {path} ({error})"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an impossible number
        faults.add(_file_error(f"expected valid YAML in {path}, got: {' '.join(str(error).split())}"))
    else:
        lines = ((key, value, at.start_mark.line + 1) for key, value, at in entries)
        return collect(((key, value, f"{path}, line {line}", (_FILE, line)) for key, value, line in lines), faults)
    return {}


def read_kwargs(kwargs: Mapping[str, object], faults: Faults) -> Settings:
    """Return the settings of keyword arguments."""
    items = enumerate(kwargs.items())
    return collect(((name, value, "keyword argument", (_ARGUMENTS, i)) for i, (name, value) in items), faults)


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that is written twice (plain YAML keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        result: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in result:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: key {key!r} is repeated or not a text")
            result[key] = self.construct_object(value_node, deep=deep)
        return result


def _file_error(text: str) -> ConfigError:
    return ConfigError(f"{CONFIG_OPTION}: {text}", param=CONFIG_OPTION)


def collect(entries: Iterable[tuple[object, object, str, Position]], faults: Faults) -> Settings:
    """Return the settings of names, values, origins and positions; names that are unknown or repeated are faults."""
    settings: Settings = {}
    for written, value, origin, position in entries:
        with faults.collecting(position, origin):
            if not isinstance(written, str):
                raise _file_error(f"expected option names as keys, got {shown(written)}")
            name = canonical_name(written)
            _verify_name(name)
            if name in settings:
                raise ConfigError(f"{name}: expected once, got again as {written}", param=name)
            settings[name] = Setting(value, origin, position)
    return settings


def _verify_name(name: str) -> None:
    is_map = name in (SPECULATIVE_OPTION, MODELS_OPTION)
    if name not in BY_NAME and name not in UNSUPPORTED and name not in NO_EFFECT and not is_map:
        hint = advice(name) or suggest(name, _ALL_NAMES)
        raise ConfigError(f"{name}: unknown option{hint}", param=name)


def _verify_flag(flag: Flag) -> None:
    if not flag.name:
        raise ConfigError(f"{COMMAND_LINE}: expected flags only, got {shown(flag.value)}")
    if flag.name == CONFIG_OPTION:
        if isinstance(flag.value, bool):
            raise _file_error("expected the path of a YAML file, got nothing")
        return
    _verify_name(flag.name)
    opt = BY_NAME.get(flag.name)
    if opt is not None and opt.kind is not bool and isinstance(flag.value, bool):
        raise ConfigError(f"{flag.name}: expected {opt.expected}, got nothing", param=flag.name)
    if flag.name == MODELS_OPTION and isinstance(flag.value, bool):
        raise ConfigError(f"{MODELS_OPTION}: expected NAME=MODEL or a map, got nothing", param=MODELS_OPTION)


def _value(flag: Flag, settings: Settings) -> object:
    opt = BY_NAME.get(flag.name)
    if flag.name != MODELS_OPTION and (opt is None or opt.kind is not tuple):
        return flag.value
    before = settings.get(flag.name)
    return [*(before.value if before is not None and isinstance(before.value, list) else []), flag.value]
