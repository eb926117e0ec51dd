"""Reads option values from a command line, a YAML file or keyword arguments, each with its origin.

Names are checked here (unknown, unsupported, given twice); the values' types and limits are the options' business.
Does not know sections or rules between options.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fastdeploy_sd.config.catalogue import BY_NAME, KNOWN_NAMES, OPTIONS, canonical_name
from fastdeploy_sd.config.option import Option
from fastdeploy_sd.config.speculative import SPECULATIVE_OPTION
from fastdeploy_sd.config.unsupported import UNSUPPORTED, rejection
from fastdeploy_sd.errors import ConfigError, suggest

COMMAND_LINE = "command line"
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written, and where."""

    value: object
    origin: str


Settings = dict[str, Setting]


def read_command_line(argv: Sequence[str], prog: str, description: str) -> Settings:
    """Return the settings of `argv` over those of the YAML file it names with --config.

    Dashes and underscores are the same in a flag; `--flag value` and `--flag=value` too.

    Raises:
        ConfigError: an unknown or unsupported flag, a missing value, a bad YAML file.
        SystemExit: --help was given (0).
    """
    parsed, rest = _build_parser(prog, description).parse_known_args([_dashed(arg) for arg in argv])
    given = vars(parsed)
    config_file = given.pop("config", None)
    settings = {} if config_file is None else read_yaml(Path(config_file))
    settings.update({name: Setting(value, COMMAND_LINE) for name, value in given.items()})
    for name, value in _leftover_flags(rest):
        _verify_name(name, value, COMMAND_LINE)
    return settings


def read_yaml(path: Path) -> Settings:
    """Return the settings of a YAML file: one map of option names to values.

    Raises:
        ConfigError: the file cannot be read or is no map, or it has an unknown, unsupported or repeated key; the text
            names the line.
    """
    try:
        loader = _StrictLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"config: expected a map of options in {path}, got something else", param="config")
        entries = [(loader.construct_object(k, True), loader.construct_object(v, True), k) for k, v in node.value]
        return _collect((_key(path, key, at), value, _origin(path, at)) for key, value, at in entries)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: expected a readable YAML file, got {path} ({error})", param="config") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config: expected valid YAML in {path}, got: {_one_line(error)}", param="config") from None


def read_kwargs(kwargs: Mapping[str, object]) -> Settings:
    """Return the settings of keyword arguments.

    Raises:
        ConfigError: an unknown or unsupported name.
    """
    return _collect((name, value, "keyword argument") for name, value in kwargs.items())


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


def _key(path: Path, key: object, node: yaml.Node) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(f"config: expected option names as keys, got {key!r} ({_origin(path, node)})", param="config")


def _origin(path: Path, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _collect(entries: Iterable[tuple[str, object, str]]) -> Settings:
    settings: Settings = {}
    for written, value, origin in entries:
        name = canonical_name(written)
        if _verify_name(name, value, origin):
            if name in settings:
                raise ConfigError(f"{name}: expected once, got again as {written} ({origin})", param=name)
            settings[name] = Setting(value, origin)
    return settings


def _verify_name(name: str, value: object, origin: str) -> bool:
    """Return whether `name` is an option; False for an unsupported one with a value that asks for nothing."""
    if name in BY_NAME or name == SPECULATIVE_OPTION:
        return True
    if name not in UNSUPPORTED:
        hint = suggest(name, (*KNOWN_NAMES, *UNSUPPORTED))
        raise ConfigError(f"{name}: unknown option{hint} ({origin})", param=name)
    reason = rejection(name, value, UNSUPPORTED[name])
    if reason is not None:
        raise ConfigError(f"{reason} ({origin})", param=name)
    return False


# ---- command line ---------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{COMMAND_LINE}: {message}")


def _build_parser(prog: str, description: str) -> argparse.ArgumentParser:
    epilog = "Underscores and dashes are the same in flags. Every option is also a YAML key."
    parser = _Parser(prog, allow_abbrev=False, description=description, epilog=epilog)
    text = "YAML file of options; the command line overrides it."
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
    groups = {s: parser.add_argument_group(s or "process") for s in dict.fromkeys(o.section for o in OPTIONS)}
    for opt in OPTIONS:
        _add_flag(groups[opt.section], opt)
    text = 'How drafts are made and judged, as a JSON object, e.g. {"method": "ngram", "num_speculative_tokens": 4}.'
    speculative = parser.add_argument_group("speculative")
    speculative.add_argument(
        "--speculative-config", dest=SPECULATIVE_OPTION, metavar="JSON", default=argparse.SUPPRESS, help=text
    )
    return parser


def _add_flag(group: Any, opt: Option) -> None:
    names = [opt.flag, *("--" + alias.replace("_", "-") for alias in opt.spec.aliases)]
    default = "required" if opt.is_required else f"default: {_shown(opt.default)}"
    text = f"{opt.spec.help} Expected {opt.expected} ({default}).".replace("%", "%%")
    common: dict[str, Any] = {"dest": opt.name, "default": argparse.SUPPRESS, "help": text}
    if opt.kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
    else:
        action = "append" if opt.kind is tuple else "store"
        group.add_argument(*names, action=action, metavar=_METAVARS[opt.kind], **common)


def _shown(default: object) -> str:
    return "none" if default in (None, ()) else str(default).lower() if isinstance(default, bool) else str(default)


def _dashed(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _leftover_flags(rest: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of flags argparse does not know; a flag without a value is True, or False as --no-NAME."""
    position = 0
    while position < len(rest):
        written, equals, value = rest[position].partition("=")
        position += 1
        if not written.startswith("-"):
            raise ConfigError(f"{COMMAND_LINE}: expected flags only, got {written!r}")
        if not equals and position < len(rest) and not rest[position].startswith("--"):
            value, equals = rest[position], "="
            position += 1
        name = canonical_name(written.lstrip("-"))
        if not equals and name.removeprefix("no_") in UNSUPPORTED:
            yield name.removeprefix("no_"), not name.startswith("no_")
        else:
            yield name, value if equals else True


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())
