"""Which drafting configurations the speculation benchmark compares with plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import draft_methods

# Drafts of each method and of whom it extends, where no configuration file says otherwise.
_NUM_DRAFTS = {"ngram": 5, "suffix": 8}
_NUM_MODEL_DRAFTS, _NUM_EXTENDED_DRAFTS = 3, 2
# A drafter in a folder of its own can be named by a configuration file only.
_DRAFTING = [m for m in draft_methods.METHODS.values() if m.source is not None and not m.has_own_folder]
METHODS: Mapping[str, Mapping[str, Any]] = (
    {
        method.name: {
            "method": method.name,
            "num_speculative_tokens": _NUM_DRAFTS.get(method.name, _NUM_MODEL_DRAFTS),
        }
        for method in _DRAFTING
    }
    | {
        method.name: {"method": method.name, "num_speculative_tokens": method.default_num_drafts}
        for method in draft_methods.METHODS.values()
        if method.chooses
    }
    | {
        f"{method.name}-{layers.name}": {
            "method": method.name,
            "num_speculative_tokens": method.default_num_drafts,
            "auto_with_mtp": True,
            "num_model_steps": _NUM_MODEL_DRAFTS,
        }
        for method in draft_methods.METHODS.values()
        if method.chooses
        for layers in _DRAFTING
        if layers.needs_model
    }
    | {
        f"{method.name}-{extension}": {
            "method": method.name,
            "mtp_strategy": strategy,
            "num_model_steps": _NUM_EXTENDED_DRAFTS,
            "num_speculative_tokens": _NUM_DRAFTS[extension],
        }
        for method in _DRAFTING
        for strategy, extension in method.extensions.items()
    }
)
_NO_FILES: Mapping[str, Any] = {m.file_key: None for m in draft_methods.METHODS.values() if m.file_key}
BOUNDS = ("accept_all", "reject_all")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One drafting configuration.

    Attributes:
        name: in tables and file names; no two configurations share one.
        config: with it; plain decoding of the same configuration is what it is compared with.
    """

    name: str
    config: Config

    @property
    def naive_config(self) -> Config:
        """The same without drafts."""
        return replace(self.config, speculative=SpeculativeConfig())


def configurations_from_files(paths: Sequence[str], engine_argv: Sequence[str], prog: str) -> list[Configuration]:
    """Return one configuration per YAML file; `engine_argv` overrides its options.

    A file's method is its name, with the number of drafts where several files have the method. Its
    `suffix_decoding_cache_file` is neither read nor written.

    Raises:
        ConfigError: a file is wrong or does not draft, or two have the same method and number of drafts.
    """
    configs = []
    for path in paths:
        config = load_config(["--config", path, *engine_argv], prog)
        if config.speculative.num_speculative_tokens == 0:
            raise ConfigError(
                f"config: expected a method that drafts, got naive in {path}; every run measures that too"
            )
        configs.append(without_cache_file(config))
    labels = Counter(_name(config.speculative) for config in configs)
    found: dict[str, tuple[str, Configuration]] = {}
    for path, config in zip(paths, configs, strict=True):
        name = _name(config.speculative)
        if labels[name] > 1:
            name += f" k={config.speculative.num_speculative_tokens}"
        if name in found:
            raise ConfigError(
                "config: expected files that differ in method or num_speculative_tokens, got"
                f" {name} in both {found[name][0]} and {path}"
            )
        found[name] = path, Configuration(name, config)
    return [configuration for _, configuration in found.values()]


def configurations_by_name(
    names: Sequence[str], engine_argv: Sequence[str], prog: str, num_drafts: Sequence[int] = ()
) -> list[Configuration]:
    """Return the configurations for some of METHODS, with their own numbers of drafts or with each of these.

    Raises:
        ConfigError: an option is wrong.
    """
    base = load_config(engine_argv, prog)
    labels: dict[str, int | None] = {f" k={count}": count for count in num_drafts}
    return [
        Configuration(f"{name}{label}", replace(base, speculative=speculative_of(name, count)))
        for name in names
        for label, count in (labels or {"": None}).items()
    ]


def speculative_of(name: str, num_drafts: int | None = None) -> SpeculativeConfig:
    """Return how one of METHODS drafts, or naive; `num_drafts` at most, None = as many as there."""
    if name == draft_methods.NAIVE:
        return SpeculativeConfig()
    own = {} if num_drafts is None else {"num_speculative_tokens": num_drafts}
    return read_speculative({**METHODS[name], **own}).config


def without_cache_file(config: Config) -> Config:
    """Return the configuration as it is measured: what a benchmark generates is nothing that a server drafts from."""
    return replace(config, speculative=replace(config.speculative, **_NO_FILES))


def with_bounds(configuration: Configuration) -> list[Configuration]:
    """Return the configuration, and what it would be if every draft were right and if every draft were wrong.

    The first is the most that drafts of this length can bring, and changes the tokens; the second is what drafting and
    verifying cost. With random weights, whose acceptance means nothing, they are all there is to know.
    """
    speculative = configuration.config.speculative
    return [
        configuration,
        *(
            Configuration(
                f"{configuration.name} {policy}",
                replace(configuration.config, speculative=replace(speculative, accept_policy=policy)),  # type: ignore[arg-type]
            )
            for policy in BOUNDS
        ),
    ]


def _name(speculative: SpeculativeConfig) -> str:
    policy = "" if speculative.accept_policy == "normal" else f" {speculative.accept_policy}"
    return speculative.label + policy
