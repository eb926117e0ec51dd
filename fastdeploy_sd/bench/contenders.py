"""Which drafting configurations the speculation benchmark compares with plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.errors import ConfigError, suggest

# What each method is run with when no configuration file says otherwise.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp-ngram": {
        "method": "mtp", "mtp_strategy": "with_ngram", "num_model_steps": 2, "num_speculative_tokens": 5,
    },
    "mtp-suffix": {
        "method": "mtp", "mtp_strategy": "with_suffix", "num_model_steps": 2, "num_speculative_tokens": 8,
    },
}  # fmt: skip
BRACKETS = ("accept_all", "reject_all")


@dataclass(frozen=True, slots=True)
class Contender:
    """One drafting configuration.

    Attributes:
        name: in tables and file names; no two contenders share one.
        config: with it; plain decoding of the same configuration is what it is compared with.
    """

    name: str
    config: Config

    @property
    def naive_config(self) -> Config:
        """The same without drafts."""
        return replace(self.config, speculative=SpeculativeConfig())


def contenders_from_files(paths: Sequence[str], engine_argv: Sequence[str], prog: str) -> list[Contender]:
    """Return one contender per YAML file; `engine_argv` overrides its options.

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
    found: dict[str, tuple[str, Contender]] = {}
    for path, config in zip(paths, configs, strict=True):
        name = _name(config.speculative)
        if labels[name] > 1:
            name += f" k={config.speculative.num_speculative_tokens}"
        if name in found:
            raise ConfigError(
                "config: expected files that differ in method or num_speculative_tokens, got"
                f" {name} in both {found[name][0]} and {path}"
            )
        found[name] = path, Contender(name, config)
    return [contender for _, contender in found.values()]


def contenders_by_name(names: Sequence[str], engine_argv: Sequence[str], prog: str) -> list[Contender]:
    """Return the contenders for some of METHODS.

    Raises:
        ConfigError: an unknown name, one that is given twice, or an option is wrong.
    """
    if len(set(names)) < len(names):
        raise ConfigError(f"methods: expected each method once, got {', '.join(names)}")
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"methods: expected some of {', '.join(METHODS)}, got {name!r}{suggest(name, METHODS)}")
    base = load_config(engine_argv, prog)
    return [Contender(name, replace(base, speculative=read_speculative(METHODS[name]).config)) for name in names]


def without_cache_file(config: Config) -> Config:
    """Return the configuration as it is measured: what a benchmark generates is nothing that a server drafts from."""
    return replace(config, speculative=replace(config.speculative, suffix_decoding_cache_file=None))


def with_brackets(contender: Contender) -> list[Contender]:
    """Return the contender, and what it would be if every draft were right and if every draft were wrong.

    The first is the most that drafts of this length can bring, and changes the tokens; the second is what drafting and
    judging cost. With random weights, whose acceptance means nothing, they are all there is to know.
    """
    speculative = contender.config.speculative
    return [
        contender,
        *(
            Contender(
                f"{contender.name} {policy}",
                replace(contender.config, speculative=replace(speculative, accept_policy=policy)),  # type: ignore[arg-type]
            )
            for policy in BRACKETS
        ),
    ]


def _name(speculative: SpeculativeConfig) -> str:
    policy = "" if speculative.accept_policy == "normal" else f" {speculative.accept_policy}"
    return speculative.label + policy
