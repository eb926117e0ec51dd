"""SamplingParams: how the next token is chosen and when generation stops. Validated on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fastdeploy_sd.errors import BadRequest, suggest

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
SEED_LIMIT = 1 << 63
MAX_COUNT = (1 << 31) - 1  # what the engine's 32-bit columns hold


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request; OpenAI's and FastDeploy's names and meanings.

    Pipeline per logits row: penalties -> logit_bias -> forbidden tokens (bad_words, min_tokens) -> temperature ->
    min_p -> top_k -> top_p -> draw with `philox(seed, position)`. Logprobs are of the raw logits.

    Attributes:
        n: sequences to return for one prompt; sequence i uses seed + i.
        temperature: 0 = greedy (highest logit, ties to the lowest token id).
        top_k: keep the k most likely tokens, 0 or -1 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: > 1 makes tokens of the prompt and the output less likely (logits divided or multiplied).
        presence_penalty, frequency_penalty: subtracted from the logit once / per occurrence in the output.
        logit_bias: token id -> added to the logit, -100..100.
        bad_words: texts that must not be produced.
        min_tokens: no EOS, stop token or stop string ends the request before that many tokens.
        max_tokens: None = up to the model's context.
        stop, stop_token_ids: end the request when produced.
        include_stop_str_in_output: keep the matched stop string in the text.
        logprobs: None = none, k = of each chosen token and of the k best.

    Raises:
        BadRequest: a value is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # normalising a frozen dataclass in its own constructor
        set_(self, "stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        set_(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        set_(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        set_(self, "logit_bias", _logit_bias(self.logit_bias))
        _integer("n", self.n, 1, 128)
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadRequest("top_p: expected a number in (0, 1], got 0 (temperature 0 is greedy)", param="top_p")
        _integer("top_k", self.top_k, -1, MAX_COUNT)
        set_(self, "top_k", max(self.top_k, 0))
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise BadRequest(
                    f"min_tokens: expected at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                    param="min_tokens",
                )
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name}: expected true or false, got {getattr(self, name)!r}", param=name)
        if self.seed is not None:
            _integer("seed", self.seed, 0, SEED_LIMIT - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is a BadRequest with a suggestion."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise BadRequest(f"{key}: unknown sampling parameter{suggest(key, known)}", param=key)
        return cls(**values)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    wanted = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise BadRequest(f"{name}: expected {wanted}, got {value!r}", param=name)
    return value


def _number(name: str, value: object, low: float, high: float) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= value <= high:  # type: ignore[operator]
        raise BadRequest(f"{name}: expected a number in {low:g}..{high:g}, got {value!r}", param=name)
    return float(value)  # type: ignore[arg-type]


def _token_ids(value: object) -> tuple[int, ...]:
    name = "stop_token_ids"
    items = () if value is None else value
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise BadRequest(f"{name}: expected a list of token ids, got {value!r}", param=name)
    if len(items) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"{name}: expected at most {MAX_STOP_TOKEN_IDS} entries, got {len(items)}", param=name)
    return tuple(_integer(name, i, 0, MAX_COUNT) for i in items)


def _strings(name: str, value: object, limit: int) -> tuple[str, ...]:
    items = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) and s for s in items):
        raise BadRequest(f"{name}: expected a non-empty string or a list of them, got {value!r}", param=name)
    if len(items) > limit:
        raise BadRequest(f"{name}: expected at most {limit} entries, got {len(items)}", param=name)
    return tuple(items)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadRequest(f"logit_bias: expected a map of token id to bias, got {value!r}", param="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(f"logit_bias: expected at most {MAX_LOGIT_BIAS} entries, got {len(value)}", param="logit_bias")
    out = {}
    for key, bias in value.items():
        text = str(key)
        if not text.isascii() or not text.isdigit():
            raise BadRequest(f"logit_bias: expected token ids as keys, got {key!r}", param="logit_bias")
        out[int(text)] = _number("logit_bias", bias, -100.0, 100.0)
    return out
