"""Resolves the speculation options of a request against the loaded methods; shared by the server and LLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import BadRequest, suggest
from fastdeploy_sd.rules.sampling import MAX_LOGPROBS
from fastdeploy_sd.types import Speculation, SpeculationInfo
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE, canonical_method

SpeculationOptions = Speculation | Mapping[str, Any] | None
"""What a caller says: a whole value, some of its fields by name, or nothing."""
_DEFAULTS = {f.name: f.default for f in fields(Speculation)}


def resolve_speculation(options: SpeculationOptions, info: SpeculationInfo) -> Speculation:
    """Return the options as the engine takes them; raises BadRequest of a field that `info` does not offer.

    A request for no drafts (`enabled` false or method "naive") is granted by every server: one body works everywhere.
    """
    given = _given_fields(options)
    for name, value in given.items():
        wanted, is_right = _TYPES[name]
        if not is_right(value):
            raise _unexpected(name, wanted, repr(value))
    num_draft_logprobs = given.get("num_draft_logprobs")
    if num_draft_logprobs is not None:
        verify_has_draft_logprobs(info, "speculation.num_draft_logprobs")
    if not given.get("enabled", True) or given.get("method") == NAIVE:
        if (name := given.get("method", NAIVE)) not in METHODS:  # a typing error, also with `enabled: false`
            raise _unexpected("method", f"one of {', '.join(METHODS)}", f"{name!r}{suggest(name, METHODS)}")
        wants_sources = given.get("token_sources", False)
        return Speculation(enabled=False, num_draft_logprobs=num_draft_logprobs, token_sources=wants_sources)
    if info.max_draft_tokens == 0:
        _verify_asks_for_nothing(given)
    method, limit = given.get("method"), info.max_draft_tokens
    if method is not None and method not in info.methods:
        wanted = f"one of {', '.join(info.methods)} (what this server has loaded)"
        raise _unexpected("method", wanted, f"{method!r}{suggest(method, info.methods)}")
    if given.get("num_speculative_tokens", 0) > limit:
        wanted = f"an integer in 1..{limit} (this server's limit)"
        raise _unexpected("num_speculative_tokens", wanted, given["num_speculative_tokens"])
    return Speculation(**given)


def may_change_tokens(granted: Speculation, temperature: float, info: SpeculationInfo, rule: SpeculativeConfig) -> bool:
    """Return whether verification may give a request tokens that plain decoding would not.

    All strategies draw the same at temperature 0, except `accept_all`. Kernels compare the temperature in float32.
    """
    if not info.lossy:
        return False
    if rule.accept_policy == "accept_all" and info.method_of(granted) != NAIVE:
        return True
    return rule.verify_strategy != "target_match" and bool(np.float32(temperature) > 0)


def verify_has_draft_logprobs(info: SpeculationInfo, field: str) -> None:
    """Verify that the server can report log-probabilities of drafts; raises BadRequest for the `field` that asked."""
    if not info.has_draft_logprobs:
        raise BadRequest(
            f"{field}: expected a server whose speculative_config has enable_draft_logprob and a method with"
            " log-probabilities, got one without",
            param=field.partition(".")[0],
        )


def _given_fields(options: SpeculationOptions) -> dict[str, Any]:
    if options is None:
        return {}
    if isinstance(options, Speculation):
        options = {name: value for name, default in _DEFAULTS.items() if (value := getattr(options, name)) != default}
    if not isinstance(options, Mapping):
        raise BadRequest(f"speculation: expected a map, got {options!r}", param="speculation")
    for name in options:
        if name not in _DEFAULTS:
            raise BadRequest(f"speculation.{name}: unknown field{suggest(str(name), _DEFAULTS)}", param="speculation")
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("method"), str):
        given["method"] = canonical_method(given["method"])
    return given


def _is_integer(value: object, low: int, high: int | None = None) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and value >= low and (high is None or value <= high)  # type: ignore[operator]


# Field -> what it must be whatever the server offers.
_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "enabled": ("true or false", lambda value: isinstance(value, bool)),
    "method": ("the name of a method", lambda value: isinstance(value, str)),
    "num_speculative_tokens": ("an integer >= 1", lambda value: _is_integer(value, 1)),
    "token_sources": ("true or false", lambda value: isinstance(value, bool)),
    "num_draft_logprobs": (f"an integer in 0..{MAX_LOGPROBS}", lambda value: _is_integer(value, 0, MAX_LOGPROBS)),
}


def _verify_asks_for_nothing(given: Mapping[str, Any]) -> None:
    """Refuse a request for drafts where nothing drafts."""
    for name, wanted in (("enabled", "false"), ("method", repr(NAIVE)), ("num_speculative_tokens", "none")):
        if name in given:
            raise _unexpected(name, f"{wanted} (this server was started without speculation)", repr(given[name]))


def _unexpected(name: str, wanted: str, got: object) -> BadRequest:
    return BadRequest(f"speculation.{name}: expected {wanted}, got {got}", param="speculation")
