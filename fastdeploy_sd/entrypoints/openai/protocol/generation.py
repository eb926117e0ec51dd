"""The fields that chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    Ignored,
    NotSupported,
    TextFormatOnly,
)
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
)


class StreamOptions(Body):
    """What a stream reports beside text.

    Attributes:
        include_usage: one more chunk at the end with the usage of the whole request.
        continuous_usage_stats: the usage so far in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationOptions(Body):
    """How this request is drafted for; values are checked in text/speculation.py.

    Attributes:
        enabled: false = plain decoding.
        method: one of those the server has loaded.
        num_speculative_tokens: drafts per step at most.
    """

    enabled: Any = None
    method: Any = None
    num_speculative_tokens: Any = None


class GenerationBody(Body):
    """Fields that chat and text completions share.

    Attributes:
        model: the served name; None = the one there is.
        request_id: id of the response and of the engine's request; None = made up.
        priority: lower runs first.
        cache_salt: prompts share cached prefixes only with the same salt.
        return_token_ids: add prompt_token_ids and completion_token_ids to each choice.
        collect_metrics: add `metrics` to each choice.
        speculation: None = as the server is configured.
        include_draft_logprobs: add `draft_logprobs` to each choice; needs logprobs.
        user .. prompt_cache_retention: accepted and of no effect.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    n: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    min_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    ignore_eos: Any = None
    seed: Any = None

    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:@/-]+$")] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None
    collect_metrics: bool | None = None
    speculation: SpeculationOptions | None = None
    include_draft_logprobs: bool | None = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    prompt_logprobs: NotSupported = None
    bad_words_token_ids: NotSupported = None
    logits_processors_args: NotSupported = None
    guided_json: NotSupported = None
    guided_regex: NotSupported = None
    guided_choice: NotSupported = None
    guided_grammar: NotSupported = None
    structural_tag: NotSupported = None
    response_format: TextFormatOnly = None
    disaggregate_info: NotSupported = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _verify_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options: expected only with stream true, got stream false", param="stream_options")
        return self

    def speculation_wish(self, params: SamplingParams) -> dict[str, Any]:
        """Return what was said about drafting, as fields of Speculation by name.

        Args:
            params: of this body; as many alternatives are reported for drafts as for tokens.

        Raises:
            BadRequest: log-probabilities of drafts are asked for, but none of tokens.
        """
        given = {} if self.speculation is None else self.speculation.model_dump(exclude_none=True)
        if not self.include_draft_logprobs:
            return given
        if params.logprobs is None:
            raise BadRequest(
                "include_draft_logprobs: expected only with logprobs, got none", param="include_draft_logprobs"
            )
        return {**given, "num_draft_logprobs": params.logprobs}

    def _build_sampling_params(self, max_tokens: int | None, logprobs: object) -> SamplingParams:
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams.from_dict({**values, "max_tokens": max_tokens, "logprobs": logprobs})
