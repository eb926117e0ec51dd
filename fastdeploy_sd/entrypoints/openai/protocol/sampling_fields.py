"""The fields of a body that are sampling options: what SamplingParams says of each, and their JSON schemas."""

from __future__ import annotations

from typing import Annotated, Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, Sampling
from fastdeploy_sd.sampling_params import (
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SEED_LIMIT,
    SamplingParams,
)

_UNSET = -1  # as llama.cpp and LM Studio write "none"


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _texts(limit: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": limit}]}


_TOKEN_IDS = {"type": "array", "items": _integer(0, MAX_COUNT), "maxItems": MAX_STOP_TOKEN_IDS}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": _number(-100, 100),
    "maxProperties": MAX_LOGIT_BIAS,
}
_FLAG = {"type": "boolean"}

MaxTokens = Annotated[int | None, Sampling("max_tokens", _integer(1, MAX_COUNT), unset=_UNSET)]
NumLogprobs = Annotated[int | None, Sampling("logprobs", _integer(0, MAX_LOGPROBS))]


class SamplingFields(Body):
    """How tokens are chosen and when generation stops; see SamplingParams.

    Attributes:
        seed: -1 is "none", like null.
    """

    n: Annotated[Any, Sampling("n", _integer(1, 128))] = None
    temperature: Annotated[Any, Sampling("temperature", _number(0, 1e6))] = None
    top_p: Annotated[Any, Sampling("top_p", {"type": "number", "exclusiveMinimum": 0, "maximum": 1})] = None
    top_k: Annotated[Any, Sampling("top_k", _integer(-1, MAX_COUNT))] = None
    min_p: Annotated[Any, Sampling("min_p", _number(0, 1))] = None
    repetition_penalty: Annotated[Any, Sampling("repetition_penalty", _number(1e-3, 1e3))] = None
    presence_penalty: Annotated[Any, Sampling("presence_penalty", _number(-2, 2))] = None
    frequency_penalty: Annotated[Any, Sampling("frequency_penalty", _number(-2, 2))] = None
    logit_bias: Annotated[Any, Sampling("logit_bias", _BIASES)] = None
    bad_words: Annotated[Any, Sampling("bad_words", _texts(MAX_BAD_WORDS))] = None
    min_tokens: Annotated[Any, Sampling("min_tokens", _integer(0, MAX_COUNT))] = None
    stop: Annotated[Any, Sampling("stop", _texts(MAX_STOP_STRINGS))] = None
    stop_token_ids: Annotated[Any, Sampling("stop_token_ids", _TOKEN_IDS)] = None
    include_stop_str_in_output: Annotated[Any, Sampling("include_stop_str_in_output", _FLAG)] = None
    ignore_eos: Annotated[Any, Sampling("ignore_eos", _FLAG)] = None
    seed: Annotated[Any, Sampling("seed", _integer(0, SEED_LIMIT - 1), unset=_UNSET)] = None

    def _build_sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the options together.

        Raises:
            BadRequest: two of them contradict each other.
        """
        given = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        return SamplingParams.from_dict({**given, "max_tokens": max_tokens, "logprobs": logprobs})
