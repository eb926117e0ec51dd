"""Reads `speculative_config`, a map, its JSON text or a method's name: every key has an effect or is an error.

Owns the rules between its keys and the defaults that depend on other keys. Does not know the rest of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.maps import has_meaning, read_map
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS, SPECULATIVE_OPTION, SpeculativeConfig
from fastdeploy_sd.config.speculative_scopes import scope_of
from fastdeploy_sd.config.unsupported import UNSUPPORTED_SPECULATIVE
from fastdeploy_sd.errors import ConfigError, shown
from fastdeploy_sd.types.draft_methods import (
    DEFAULT_METHOD,
    METHODS,
    NAIVE,
    DraftMethod,
    canonical_method,
    methods_reading,
)

_NAME = re.compile(r"\s*[A-Za-z][\w-]*\s*")
# Drafts of draft layers for a method that chooses, where no number is given.
_CHOSEN_MODEL_STEPS = 3
# A tree takes the likeliest tokens wherever they are, so less probable ones may be in it.
_TREE_PROB_KEY, _TREE_PROB = "suffix_decoding_min_token_prob", 0.01
# vLLM's names of keys.
_KEY_ALIASES = {"prompt_lookup_max": "max_ngram_size", "prompt_lookup_min": "min_ngram_size"}
_ROOM = "max_num_batched_tokens"
_LENGTH_KEYS = {
    "method",
    "num_speculative_tokens",
    "mtp_strategy",
    "num_model_steps",
    "max_ngram_size",
    "min_ngram_size",
}


@dataclass(frozen=True, slots=True)
class SpeculativeMap:
    """What a map says.

    Attributes:
        config: with every default resolved.
        origins: key -> "" when it was written, else the key it follows from; absent keys have their default.
        notes: for the log: what was accepted without effect.
    """

    config: SpeculativeConfig
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_speculative(value: object) -> SpeculativeMap:
    """Return the configuration that `value` describes; None says nothing, and a word is the name of a method.

    Defaults that depend on other keys: k (`num_speculative_tokens`) is the method's own; where MTP drafts alone, k and
    `num_model_steps` follow one another; a `suffix_decoding_*` key with method mtp selects with_suffix. Raises
    ConfigError: no map, JSON object or name; a key that is unknown, repeated or not supported; a value its key does not
    allow; a key that the others leave without effect, unless it has its default; keys that contradict.
    """
    if value is None:
        value = {}
    elif isinstance(value, str) and _NAME.fullmatch(value):
        value = {"method": value}
    faults = Faults()
    written, at_fault = _read_keys(value, faults)
    values, origins = dict(written), dict.fromkeys(written, "")
    with faults.collecting():
        _derive_policy(values, origins)
    values.setdefault("method", DEFAULT_METHOD)
    notes = _derive_drafting(values, origins)
    config = SpeculativeConfig(**values)
    if "method" not in at_fault:
        _verify_scopes(config, written, at_fault, faults)
    if at_fault.isdisjoint(_LENGTH_KEYS):
        with faults.collecting():
            _verify_lengths(config, written)
    faults.raise_all()
    return SpeculativeMap(config, origins, notes)


def fit_defaults(read: SpeculativeMap, room: int) -> SpeculativeMap:
    """Return what a map says with the defaults that a step has room for.

    As many drafts as fit where a method that chooses has its default of them; plain decoding where none fits and no key
    was written. What was written stays: too much of it is an error of the rules between options. `room`: drafts that a
    step holds of one request.
    """
    config = read.config
    if not METHODS[config.method].chooses or "num_speculative_tokens" in read.origins:
        return read
    if config.num_speculative_tokens <= room:
        return read
    if room >= 1:
        origins = {**read.origins, "num_speculative_tokens": _ROOM}
        return replace(read, config=replace(config, num_speculative_tokens=room), origins=origins)
    return read if read.origins else SpeculativeMap(SpeculativeConfig(), {"method": _ROOM})


def _read_keys(value: object, faults: Faults) -> tuple[dict[str, Any], set[str]]:
    """Return the keys with sound values, and the names of those that are wrong or missing."""
    written: dict[str, Any] = {}
    items = dict(_without_aliases(value))
    at_fault = set(items)
    for key, item in items.items():
        with faults.collecting():
            if has_meaning(SPECULATIVE_OPTION, key, item, SPECULATIVE_KEYS, UNSUPPORTED_SPECULATIVE):
                written[key] = _convert(key, item)
            at_fault.discard(key)
    return written, at_fault


def _without_aliases(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the map under our names."""
    keys = read_map(SPECULATIVE_OPTION, value)
    for key, item in keys.items():
        name = _KEY_ALIASES.get(key, key)
        if name != key and name in keys:
            raise _error(name, "once", f"it as {key} too")
        yield name, item


def _convert(key: str, value: object) -> Any:
    if key == "method" and isinstance(value, str):
        value = canonical_method(value)
    return SPECULATIVE_KEYS[key].convert(value)


# ---- what follows from other keys -----------------------------------------------------------------------------------


def _derive_policy(values: dict[str, Any], origins: dict[str, str]) -> None:
    if not values.pop("benchmark_mode", False):
        return
    policy = values.setdefault("accept_policy", "reject_all")
    if policy != "reject_all":
        raise _error("accept_policy", "reject_all with benchmark_mode", repr(policy))
    origins.setdefault("accept_policy", "benchmark_mode")


def _derive_drafting(values: dict[str, Any], origins: dict[str, str]) -> tuple[str, ...]:
    """Return lines for the log."""
    method = METHODS[values["method"]]
    if method.needs_model:
        _derive_strategy(method, values, origins)
        if values.get("mtp_strategy", "default") == "default":
            _derive_equal(values, origins, "num_model_steps", "num_speculative_tokens")
            _derive_equal(values, origins, "num_speculative_tokens", "num_model_steps")
        if method.default_num_drafts > 1 and "num_speculative_tokens" not in values:
            values["num_speculative_tokens"] = values["num_model_steps"] = method.default_num_drafts
    if method.chooses:
        _derive_layers(values, origins)
    if values.get("draft_trees") and _TREE_PROB_KEY not in values:
        values[_TREE_PROB_KEY], origins[_TREE_PROB_KEY] = _TREE_PROB, "draft_trees"
    if method.name != NAIVE:
        values.setdefault("num_speculative_tokens", method.default_num_drafts)
    elif values.get("num_speculative_tokens"):
        # FastDeploy's published example has a number, which it sets to 0 too.
        given, values["num_speculative_tokens"] = values["num_speculative_tokens"], 0
        origins["num_speculative_tokens"] = "method naive"
        return (f"{SPECULATIVE_OPTION}.num_speculative_tokens: {given} is 0 in effect: method naive makes no drafts",)
    return ()


def _derive_layers(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Let a key that says something of draft layers ask for them."""
    # Of methods that share a key the first, unless another is named.
    keys = {method.auto_key: method for method in reversed(list(METHODS.values())) if method.auto_key}
    named = METHODS.get(values.get("draft_method") or "")
    if named is not None and named.auto_key in keys:
        keys[named.auto_key] = named
    origin = next((key for key in ("num_model_steps", "model") if values.get(key)), None)
    if origin is not None and not keys.keys() & values.keys():
        values["auto_with_mtp"], origins["auto_with_mtp"] = True, origin
    asked = [method for key, method in keys.items() if values.get(key)]
    if asked:
        most = max(asked[0].default_num_drafts, _CHOSEN_MODEL_STEPS)
        values.setdefault("num_model_steps", max(1, min(values.get("num_speculative_tokens", most), most)))


def _derive_strategy(method: DraftMethod, values: dict[str, Any], origins: dict[str, str]) -> None:
    """Let a key that only one extending method reads ask for that method."""
    implied = method.extensions.get(method.implied_strategy)
    own_key = next((key for key in values if [m.name for m in methods_reading(key)] == [implied]), None)
    if own_key is not None and "mtp_strategy" not in values:
        values["mtp_strategy"], origins["mtp_strategy"] = method.implied_strategy, own_key


def _derive_equal(values: dict[str, Any], origins: dict[str, str], key: str, origin: str) -> None:
    """Give an absent key the value of a present one. A length of 0 is not passed on: it is an error by itself."""
    if key not in values and values.get(origin, 0) > 0:
        values[key], origins[key] = values[origin], origin


# ---- rules between keys ---------------------------------------------------------------------------------------------


def _verify_scopes(config: SpeculativeConfig, written: Mapping[str, Any], at_fault: set[str], faults: Faults) -> None:
    for key, value in written.items():
        scope = scope_of(key)
        if not scope.holds(config) and value != SPECULATIVE_KEYS[key].default and scope.subject not in at_fault:
            got = f"{shown(value)} with {scope.subject} {getattr(config, scope.subject)}"
            faults.add(_error(key, f"only with {scope.where}", got))


def _verify_lengths(config: SpeculativeConfig, written: Mapping[str, Any]) -> None:
    if config.max_ngram_size < config.min_ngram_size:
        expected = f"at least min_ngram_size ({config.min_ngram_size})"
        raise _error("max_ngram_size", expected, config.max_ngram_size)
    if config.method == NAIVE:
        return
    if config.num_speculative_tokens < 1:
        expected = f"at least 1 with method {config.method}"
        raise _error("num_speculative_tokens", expected, config.num_speculative_tokens)
    if config.auto_with_mtp and config.auto_with_draft_model:
        raise _error("auto_with_draft_model", "false with auto_with_mtp, as auto asks one model", "true")
    is_model_asked = config.auto_with_mtp or config.auto_with_draft_model
    if is_model_asked and config.num_model_steps > config.num_speculative_tokens:
        at_most = f"at most num_speculative_tokens ({config.num_speculative_tokens})"
        raise _error("num_model_steps", at_most, config.num_model_steps)
    if METHODS[config.method].needs_model:
        _verify_model_steps(config, has_default="num_speculative_tokens" not in written)


def _verify_model_steps(config: SpeculativeConfig, has_default: bool) -> None:
    """`has_default`: the number of drafts was not written."""
    k, num_steps, strategy = config.num_speculative_tokens, config.num_model_steps, config.mtp_strategy
    got = f"{k} (the default)" if has_default else k
    if strategy == "default":
        if config.draft_trees and k < num_steps:
            raise _error("num_speculative_tokens", f"at least num_model_steps ({num_steps})", got)
        if k != num_steps and not config.draft_trees:
            equal = f"num_model_steps ({num_steps}), as nothing extends the drafts of mtp_strategy default"
            raise _error("num_speculative_tokens", equal, got)
    elif k <= num_steps:
        room = f"more than num_model_steps ({num_steps}), as mtp_strategy {strategy} extends the drafts"
        raise _error("num_speculative_tokens", room, got)


def _error(key: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"{SPECULATIVE_OPTION}.{key}: expected {expected}, got {got}", param=SPECULATIVE_OPTION)
