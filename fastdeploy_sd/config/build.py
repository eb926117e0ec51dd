"""Turns settings into a Config: types and limits of each option, then the rules between them.

Also the way back: the effective values with their origins, and JSON to hand a Config to another process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastdeploy_sd.config.catalogue import BY_NAME, OPTIONS, SECTIONS
from fastdeploy_sd.config.environment import warn_of_unread_variables
from fastdeploy_sd.config.option import Option
from fastdeploy_sd.config.quantization import QuantizationFormats
from fastdeploy_sd.config.rules import verify_rules
from fastdeploy_sd.config.sections import DEMO_MODEL, Config
from fastdeploy_sd.config.sources import Setting, Settings, read_command_line, read_kwargs
from fastdeploy_sd.config.speculative import SPECULATIVE_FIELDS, SPECULATIVE_KEYS, SPECULATIVE_OPTION, scope_of
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.errors import ConfigError

HIDDEN = "(hidden)"
_QUEUE = "max_num_queued_requests"


@dataclass(frozen=True, slots=True)
class Effective:
    """One effective option value; a secret one reads "(hidden)"."""

    name: str
    value: object
    origin: str


def load_config(
    argv: Sequence[str], prog: str = "fastdeploy-sd serve", description: str = "Serve a model over the OpenAI API."
) -> Config:
    """Return the configuration of a command line: explicit flags > YAML (--config FILE) > defaults.

    Args:
        argv: the arguments. prog, description: what --help shows.

    Raises:
        ConfigError: anything that cannot be honoured exactly; the text names the option, its origin and, for a name
            that does not exist, the nearest one.
        SystemExit: --help was given (0).
    """
    return _build(read_command_line(argv, prog, description))


def config_from_kwargs(**kwargs: object) -> Config:
    """Return the configuration of keyword arguments with the option names of YAML.

    Raises:
        ConfigError: as load_config.
    """
    return _build(read_kwargs(kwargs))


def verify_offline(config: Config) -> None:
    """Refuse what only a server has: without one it would be accepted and do nothing.

    Raises:
        ConfigError: an option of the server was given.
    """
    for name, origin in config.origins.items():
        if name in BY_NAME and BY_NAME[name].section == "server":
            raise ConfigError(f"{name}: expected options of the engine, got one of the server ({origin})", param=name)


def explain(config: Config) -> list[Effective]:
    """Return every option with its effective value and where that came from, secrets hidden.

    Of `speculative_config` there is a row for each key that has a meaning with the configured method.
    """
    in_use = [o for o in SPECULATIVE_FIELDS if scope_of(o.name).holds(config.speculative)]
    return [
        Effective(o.path, _public_value(config, o), config.origins.get(o.path, "default")) for o in (*OPTIONS, *in_use)
    ]


def to_json(config: Config, *, with_secrets: bool = False) -> str:
    """Return the configuration as JSON text; options marked secret are left out unless asked for."""
    options = {o.name: _value(config, o) for o in OPTIONS if with_secrets or not o.spec.secret}
    speculative = asdict(config.speculative)
    return json.dumps({"options": options, "speculative": speculative, "origins": dict(config.origins)})


def from_json(text: str) -> Config:
    """Return the configuration that `to_json` wrote; left-out secrets have their defaults.

    Raises:
        ConfigError: the text is not such a configuration.
    """
    try:
        document = json.loads(text)
        values = {name: BY_NAME[name].convert(value) for name, value in document["options"].items()}
        config = _assemble(values, document["origins"])
        return replace(config, speculative=type(config.speculative)(**document["speculative"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"config: expected JSON of a configuration, got something else: {error}") from None


def _build(settings: Settings) -> Config:
    warn_of_unread_variables(os.environ)
    settings = dict(settings)
    speculative = settings.pop(SPECULATIVE_OPTION, None)
    values = {name: _convert(BY_NAME[name], setting) for name, setting in settings.items()}
    origins = {name: setting.origin for name, setting in settings.items()}
    _require(values)
    _apply_max_concurrency(values, origins)
    config = _assemble(values, origins)
    if speculative is not None:
        config = _with_speculative(config, speculative)
    verify_rules(config)
    _verify_checkpoint(config)
    return config


def _convert(opt: Option, setting: Setting) -> Any:
    try:
        return opt.convert(setting.value)
    except ConfigError as error:
        raise _located(error, setting) from None


def _with_speculative(config: Config, setting: Setting) -> Config:
    try:
        read = read_speculative(setting.value)
    except ConfigError as error:
        raise _located(error, setting) from None
    origins = {**config.origins, SPECULATIVE_OPTION: setting.origin}
    for key, source in read.origins.items():
        path = SPECULATIVE_KEYS[key].path
        origins[path] = f"{source}, {setting.origin}" if source else setting.origin
    return replace(config, speculative=read.config, origins=origins)


def _located(error: ConfigError, setting: Setting) -> ConfigError:
    return ConfigError(f"{error.message} ({setting.origin})", param=error.param)


def _require(values: Mapping[str, Any]) -> None:
    for opt in OPTIONS:
        if opt.is_required and opt.name not in values:
            raise ConfigError(f"{opt.name}: expected {opt.expected}, got nothing ({opt.flag})", param=opt.name)


def _apply_max_concurrency(values: dict[str, Any], origins: dict[str, str]) -> None:
    """What does not run waits: of `max_concurrency` requests at most max_num_seqs run."""
    limit = values.get("max_concurrency")
    if limit is None:
        return
    if _QUEUE in values:
        raise ConfigError(f"max_concurrency: expected without {_QUEUE}, got both", param="max_concurrency")
    num_running = values.get("max_num_seqs", BY_NAME["max_num_seqs"].default)
    if limit <= num_running:
        raise ConfigError(
            f"max_concurrency: expected more than max_num_seqs ({num_running}), got {limit}", param="max_concurrency"
        )
    values[_QUEUE] = limit - num_running
    origins[_QUEUE] = f"max_concurrency - max_num_seqs, {origins['max_concurrency']}"


def _assemble(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    by_section: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for name, value in values.items():
        by_section[BY_NAME[name].section][BY_NAME[name].field_name] = value
    sections = {name: cls(**by_section[name]) for name, cls in SECTIONS.items()}
    return Config(**sections, **by_section[""], origins=dict(origins))


def _verify_checkpoint(config: Config) -> None:
    if not (config.model.path / "config.json").is_file():
        origin = config.origins.get("model", "default")
        raise ConfigError(
            f"model: expected a checkpoint directory with config.json, or '{DEMO_MODEL}',"
            f" got {config.model.model!r} ({origin})",
            param="model",
        )


def _value(config: Config, opt: Option) -> Any:
    """Return the option's value as JSON has it."""
    value = getattr(getattr(config, opt.section) if opt.section else config, opt.field_name)
    return value.to_map() if isinstance(value, QuantizationFormats) else value


def _public_value(config: Config, opt: Option) -> object:
    value = _value(config, opt)
    return HIDDEN if opt.spec.secret and value else value
