"""SamplingParams: how the next token is chosen and when generation stops. Validated on construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastdeploy_sd.errors import BadRequest, shown, suggest
from fastdeploy_sd.rules.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBER_RULES,
    verify_count,
)

_TOP_K = replace(NUMBER_RULES["top_k"], low=-1)  # another way to say 0
_REQUIRED = (
    "n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
)  # fmt: skip
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_MAX_ID_DIGITS = 10


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
        max_tokens: None = up to the model's context; 0 = only the prompt is computed.
        include_stop_str_in_output: keep the matched stop string in the text.
        logprobs: None = none, k = of each chosen token and of the k best.
        prompt_logprobs: the same of the prompt's tokens, each after those before it. The first one has none.

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
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in _CHECKS:
            object.__setattr__(self, name, verified(name, getattr(self, name)))  # normalised in its own constructor
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens: expected at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                param="min_tokens",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is a BadRequest with a suggestion."""
        for key in values:
            if key not in _CHECKS:
                raise BadRequest(f"{key}: unknown sampling parameter{suggest(key, _CHECKS)}", param=key)
        return cls(**values)


def verified(name: str, value: object) -> object:
    """Return the value of one parameter as SamplingParams holds it; raises BadRequest. Checks no two together."""
    return _CHECKS[name](value)


def _number(name: str, value: object) -> object:
    NUMBER_RULES[name].verify(name, value)
    return value


def _optional_number(name: str, value: object) -> object:
    return None if value is None else _number(name, value)


def _top_k(value: Any) -> int:
    _TOP_K.verify("top_k", value)
    return max(int(value), 0)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: expected true or false, got {shown(value)}", param=name)
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    name = "stop_token_ids"
    items = () if value is None else value
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise BadRequest(f"{name}: expected a list of token ids, got {shown(value)}", param=name)
    verify_count(name, items, MAX_STOP_TOKEN_IDS)
    for item in items:
        NUMBER_RULES[name].verify(name, item)
    return tuple(items)


def _strings(name: str, value: object, limit: int) -> tuple[str, ...]:
    items = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise BadRequest(f"{name}: expected a non-empty string or a list of them, got {shown(value)}", param=name)
    verify_count(name, items, limit)
    for item in items:
        if not isinstance(item, str) or not item:
            raise BadRequest(f"{name}: expected a non-empty string or a list of them, got {shown(item)}", param=name)
    return tuple(items)


def _logit_bias(value: object) -> dict[int, float]:
    name = "logit_bias"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name}: expected a map of token id to bias, got {shown(value)}", param=name)
    verify_count(name, value, MAX_LOGIT_BIAS)
    out: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _bias_token_id(key)
        if token_id in out:
            raise BadRequest(f"{name}: expected every token id once, got {token_id} twice", param=name)
        NUMBER_RULES[name].verify(name, bias)
        out[token_id] = float(bias)
    return out


def _bias_token_id(key: object) -> int:
    """JSON has texts as keys; a long text is not turned into a number, which takes time by the square of its length."""
    token_id = key
    if isinstance(key, str) and len(key) <= _MAX_ID_DIGITS and key.isascii() and key.isdigit():
        token_id = int(key)
    if not isinstance(token_id, int) or not NUMBER_RULES["stop_token_ids"].accepts(token_id):
        raise BadRequest(f"logit_bias: expected token ids as keys, got {shown(key)}", param="logit_bias")
    return token_id


# Every parameter of SamplingParams by its name.
_CHECKS: Mapping[str, Callable[[Any], object]] = {
    **{name: partial(_number, name) for name in _REQUIRED},
    **{name: partial(_optional_number, name) for name in _OPTIONAL},
    **{name: partial(_flag, name) for name in ("include_stop_str_in_output", "ignore_eos")},
    "top_k": _top_k,
    "logit_bias": _logit_bias,
    "stop_token_ids": _token_ids,
    "stop": partial(_strings, "stop", limit=MAX_STOP_STRINGS),
    "bad_words": partial(_strings, "bad_words", limit=MAX_BAD_WORDS),
}
