"""The fields of a body that are sampling options: what SamplingParams says of each, and their JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, Sampling
from fastdeploy_sd.rules.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBER_RULES,
    SOME_TOKENS,
)
from fastdeploy_sd.sampling_params import SamplingParams

_UNSET = -1  # as llama.cpp and LM Studio write "none"


def number_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a number that SamplingParams has a rule for."""
    rule = NUMBER_RULES[name]
    kind = "number" if rule.is_float else "integer"
    return {"type": kind, "exclusiveMinimum" if rule.is_low_open else "minimum": rule.low, "maximum": rule.high}


def _texts(limit: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": limit}]}


_TOKEN_IDS = {"type": "array", "items": number_schema("stop_token_ids"), "maxItems": MAX_STOP_TOKEN_IDS}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": number_schema("logit_bias"),
    "maxProperties": MAX_LOGIT_BIAS,
}
_FLAG = {"type": "boolean"}

AnyMaxTokens = Annotated[int | None, Sampling("max_tokens", number_schema("max_tokens"), unset=_UNSET)]
MaxTokens = Annotated[
    int | None,
    Sampling("max_tokens", {**number_schema("max_tokens"), "minimum": SOME_TOKENS.low}, unset=_UNSET, rule=SOME_TOKENS),
]
NumLogprobs = Annotated[int | None, Sampling("logprobs", number_schema("logprobs"))]


class SamplingFields(Body):
    """How tokens are chosen and when generation stops, see SamplingParams; a seed of -1 is "none", like null."""

    n: Annotated[Any, Sampling("n", number_schema("n"))] = None
    temperature: Annotated[Any, Sampling("temperature", number_schema("temperature"))] = None
    top_p: Annotated[Any, Sampling("top_p", number_schema("top_p"))] = None
    top_k: Annotated[Any, Sampling("top_k", {**number_schema("top_k"), "minimum": -1})] = None
    min_p: Annotated[Any, Sampling("min_p", number_schema("min_p"))] = None
    repetition_penalty: Annotated[Any, Sampling("repetition_penalty", number_schema("repetition_penalty"))] = None
    presence_penalty: Annotated[Any, Sampling("presence_penalty", number_schema("presence_penalty"))] = None
    frequency_penalty: Annotated[Any, Sampling("frequency_penalty", number_schema("frequency_penalty"))] = None
    logit_bias: Annotated[Any, Sampling("logit_bias", _BIASES)] = None
    bad_words: Annotated[Any, Sampling("bad_words", _texts(MAX_BAD_WORDS))] = None
    min_tokens: Annotated[Any, Sampling("min_tokens", number_schema("min_tokens"))] = None
    stop: Annotated[Any, Sampling("stop", _texts(MAX_STOP_STRINGS))] = None
    stop_token_ids: Annotated[Any, Sampling("stop_token_ids", _TOKEN_IDS)] = None
    include_stop_str_in_output: Annotated[Any, Sampling("include_stop_str_in_output", _FLAG)] = None
    ignore_eos: Annotated[Any, Sampling("ignore_eos", _FLAG)] = None
    prompt_logprobs: Annotated[Any, Sampling("prompt_logprobs", number_schema("prompt_logprobs"))] = None
    seed: Annotated[Any, Sampling("seed", number_schema("seed"), unset=_UNSET)] = None

    def _build_sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """Return the options together, over `defaults`. Raises BadRequest: two of them contradict each other."""
        given = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        return SamplingParams.from_dict({**defaults, **given, "max_tokens": max_tokens, "logprobs": logprobs})
