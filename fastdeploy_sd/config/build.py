"""Turns settings into a Config: types and limits of each option, then the rules between them. All faults at once.

Also the way back: the effective values with their origins, and JSON to hand a Config to another process.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastdeploy_sd.config.catalogue import BY_NAME, MODELS_OPTION, OPTIONS, SECTIONS
from fastdeploy_sd.config.environment import unread_variables
from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.config.faults import LAST, Faults
from fastdeploy_sd.config.generation_values import GenerationValues
from fastdeploy_sd.config.model_names import advice, hub_name, is_gguf
from fastdeploy_sd.config.model_section import DEMO_MODEL
from fastdeploy_sd.config.no_effect import NO_EFFECT, means_default, no_effect_notes, verify_value
from fastdeploy_sd.config.option import Option
from fastdeploy_sd.config.parallel_section import Neighbours
from fastdeploy_sd.config.quantization import QuantizationFormats
from fastdeploy_sd.config.redis_section import idle_notes
from fastdeploy_sd.config.rules import RULES
from fastdeploy_sd.config.sections import Config
from fastdeploy_sd.config.sources import CONFIG_OPTION, Settings, read_command_line, read_kwargs
from fastdeploy_sd.config.speculative import SPECULATIVE_FIELDS, SPECULATIVE_KEYS, SPECULATIVE_OPTION
from fastdeploy_sd.config.speculative_map import SpeculativeMap, fit_defaults, read_speculative
from fastdeploy_sd.config.speculative_scopes import scope_of
from fastdeploy_sd.config.splitwise_section import role_notes
from fastdeploy_sd.config.unsupported import UNSUPPORTED, rejection
from fastdeploy_sd.errors import ConfigError, shown

HIDDEN = "(hidden)"
_FASTDEPLOY_REVISION = "master"  # its default, which asks for nothing
_QUEUE = "max_num_queued_requests"
_STEP = "max_num_batched_tokens"
_log = logging.getLogger(__name__)


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
        ConfigError: anything that cannot be honoured exactly; for each fault the text names the option, what was
            expected, what came and from where and, for a name that does not exist, the nearest one.
        SystemExit: --help was given (0).
    """
    faults = Faults()
    return build_config(read_command_line(argv, prog, description, faults), faults)


def config_from_kwargs(**kwargs: object) -> Config:
    """Return the configuration of keyword arguments with the option names of YAML.

    Raises ConfigError: as load_config.
    """
    faults = Faults()
    return build_config(read_kwargs(kwargs, faults), faults)


def verify_offline(config: Config) -> None:
    """Refuse what only a server has: without one it would be accepted and do nothing.

    Raises ConfigError: options of the server were given.
    """
    faults = Faults()
    for name, origin in config.origins.items():
        if name == "lora_root" or (name in BY_NAME and BY_NAME[name].section in ("server", "splitwise", "redis")):
            text = f"{name}: expected options of the engine, got one of the server"
            faults.add(ConfigError(text, param=name), origin=origin)
    if (size := config.parallel.data_parallel_size) > 1:
        text = f"data_parallel_size: expected 1, as an LLM is one engine, got {size}"
        faults.add(ConfigError(text, param="data_parallel_size"), origin=config.origins["data_parallel_size"])
    faults.raise_all()


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
    password = None if with_secrets else ""
    options = {o.name: _value(config, o, password) for o in OPTIONS if with_secrets or not o.spec.secret}
    speculative = asdict(config.speculative)
    return json.dumps(
        {
            "options": options,
            "speculative": speculative,
            "origins": dict(config.origins),
            "neighbours": asdict(config.parallel.neighbours),
            "weights_file": config.parallel.weights_file,
        }
    )


def from_json(text: str) -> Config:
    """Return the configuration that `to_json` wrote; left-out secrets have their defaults.

    Raises ConfigError: the text is not such a configuration.
    """
    try:
        document = json.loads(text)
        values = {name: BY_NAME[name].convert(value) for name, value in document["options"].items()}
        config = _assemble(values, document["origins"])
        neighbours, weights_file = Neighbours(**document["neighbours"]), document["weights_file"]
        parallel = replace(config.parallel, neighbours=neighbours, weights_file=weights_file)
        speculative = type(config.speculative)(**document["speculative"])
        return replace(config, speculative=speculative, parallel=parallel)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"config: expected JSON of a configuration, got something else: {error}") from None


def build_config(settings: Settings, faults: Faults) -> Config:
    """Read every value, then check every rule whose options are sound; log what has no effect.

    Raises ConfigError: there are faults, here or from before.
    """
    values, speculative = _convert_all(settings, faults)
    _require(settings, faults)
    origins = {name: setting.origin for name, setting in settings.items() if name in values}
    with faults.collecting(_position(settings, "max_concurrency"), origins.get("max_concurrency", "")):
        _apply_max_concurrency(values, origins)
    _apply_whole_prompts(values, origins)
    config = _with_speculative(_assemble_sound(values, origins, settings, faults), speculative, settings)
    _verify_rules(config, settings, faults)
    faults.raise_all()
    idle = [*role_notes(settings, config.splitwise.splitwise_role), *idle_notes(settings, config.redis)]
    without_effect = no_effect_notes({name: setting.value for name, setting in settings.items()})
    for note in [*without_effect, *idle, *speculative.notes]:
        _log.warning("%s", note)
    for note in unread_variables(os.environ):
        _log.warning("%s", note)
    return config


def _convert_all(settings: Settings, faults: Faults) -> tuple[dict[str, Any], SpeculativeMap]:
    """Return the sound values of the options, and what `speculative_config` says."""
    values: dict[str, Any] = {}
    speculative = read_speculative(None)
    for name, setting in settings.items():
        with faults.collecting(setting.position, setting.origin):
            if means_default(name, setting.value):
                continue
            if name in BY_NAME:
                values[name] = BY_NAME[name].convert(setting.value)
            elif name == SPECULATIVE_OPTION:
                speculative = read_speculative(setting.value)
            elif name == MODELS_OPTION:
                raise ConfigError(f"{name}: expected none, as one model is wanted here, got it", param=name)
            elif name in NO_EFFECT:
                verify_value(name, setting.value)
            else:
                _refuse_unsupported(name, setting.value)
    return values, speculative


def _refuse_unsupported(name: str, value: object) -> None:
    reason = rejection(name, value, UNSUPPORTED[name])
    if reason is not None:
        raise ConfigError(reason, param=name)


def _assemble_sound(values: dict[str, Any], origins: Mapping[str, str], settings: Settings, faults: Faults) -> Config:
    """Assemble the values that their sections accept. A value that is refused becomes a fault and is left out."""
    while True:
        try:
            return _assemble({"model": DEMO_MODEL} | values, origins)
        except ConfigError as error:
            name = error.param or ""
            faults.add(error, _position(settings, name), origins.get(name, ""))
            if values.pop(name, None) is None:
                faults.raise_all()


def _with_speculative(config: Config, read: SpeculativeMap, settings: Settings) -> Config:
    limits = config.scheduler
    read = fit_defaults(read, limits.rows_of_request(1) - 1)
    written = {SPECULATIVE_OPTION: settings[SPECULATIVE_OPTION].origin} if SPECULATIVE_OPTION in settings else {}
    origins = {**config.origins, **written}
    for key, source in read.origins.items():
        origins[SPECULATIVE_KEYS[key].path] = ", ".join(filter(None, (source, *written.values())))
    return replace(config, speculative=read.config, origins=origins)


def _verify_rules(config: Config, settings: Settings, faults: Faults) -> None:
    """Check the rules between options, but not those about an option that is at fault itself."""
    at_fault = faults.params
    if "model" not in at_fault and CONFIG_OPTION not in at_fault:
        with faults.collecting(_position(settings, "model"), config.origins.get("model", "")):
            _verify_checkpoint(config)
    for rule in RULES:
        if at_fault.isdisjoint(rule.options):
            at = rule.options[0]
            with faults.collecting(_position(settings, at), config.origins.get(at, "the default")):
                rule.verify(config)


def _position(settings: Settings, name: str) -> tuple[int, int]:
    return settings[name].position if name in settings else LAST


def _require(settings: Settings, faults: Faults) -> None:
    """Note required options that are missing; not where the file that could name them was not read."""
    for opt in OPTIONS:
        if opt.is_required and opt.name not in settings and CONFIG_OPTION not in faults.params:
            text = f"{opt.name}: expected {opt.expected}, got nothing ({opt.flag})"
            faults.add(ConfigError(text, param=opt.name))


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


def _apply_whole_prompts(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Without chunked prefill a step must hold the longest prompt. That is then the default, as in FastDeploy."""
    longest = values.get("max_model_len")
    if values.get("enable_chunked_prefill", True) or longest is None or _STEP in values:
        return
    if longest > BY_NAME[_STEP].default:
        values[_STEP] = longest
        origins[_STEP] = f"max_model_len without chunked prefill, {origins['max_model_len']}"


def _assemble(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    by_section: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for name, value in values.items():
        by_section[BY_NAME[name].section][BY_NAME[name].field_name] = value
    sections = {name: cls(**by_section[name]) for name, cls in SECTIONS.items()}
    return Config(**sections, **by_section[""], origins=dict(origins))


def _verify_checkpoint(config: Config) -> None:
    """Take facts from a folder; a name is resolved where the model is loaded."""
    model = config.model
    if hub_name(model.model) is not None:
        return
    if model.revision not in (None, _FASTDEPLOY_REVISION):
        raise ConfigError(
            f"revision: expected none, as the model is a directory ({shown(model.model)}), got {shown(model.revision)}",
            param="revision",
        )
    # os.path says no where pathlib raises: a name that is too long, a folder that may not be looked into.
    if os.path.isfile(model.path / "config.json") or is_gguf(model.path):
        return
    raise ConfigError(
        "model: expected a checkpoint directory with config.json, a GGUF file, a name as 'Qwen/Qwen3-0.6B', or"
        f" '{DEMO_MODEL}', got {shown(model.model)}" + advice(model.path),
        param="model",
    )


def _value(config: Config, opt: Option, password: str | None = None) -> Any:
    """Return the option's value as JSON has it, a password in a map replaced by another text unless that is None."""
    value = getattr(getattr(config, opt.section) if opt.section else config, opt.field_name)
    if isinstance(value, EplbConfig) and password is not None:
        value = value.with_password(password)
    return value.to_map() if isinstance(value, QuantizationFormats | EplbConfig | GenerationValues) else value


def _public_value(config: Config, opt: Option) -> object:
    value = _value(config, opt, HIDDEN)
    return HIDDEN if opt.spec.secret and value else value
