"""The fields that chat and text completions share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    Ignored,
    Integer,
    Matching,
    NotSupported,
    Only,
    SmallMap,
)
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import MaxTokens, SamplingFields
from fastdeploy_sd.entrypoints.openai.protocol.structured_fields import StructuredFields
from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.rules.sampling import MAX_COUNT
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.reasoning_formats import Display
from fastdeploy_sd.text.tool_calls.tools import ToolUse

TemplateText = Annotated[str, Field(max_length=64)] | None


def template_variables(thinking: bool | None, reasoning_effort: str | None, verbosity: str | None) -> dict[str, Any]:
    """Return the variables that were given; those that a template does not read have no effect.

    Whether to think has two names among templates and gets both. An effort of "none" means not to, unless that is said
    apart.
    """
    if thinking is None and reasoning_effort == "none":
        thinking = False
    fields = {"enable_thinking": thinking, "thinking": thinking, "reasoning_effort": reasoning_effort}
    return {name: value for name, value in (fields | {"verbosity": verbosity}).items() if value is not None}


_PRIORITY_LIMIT = 1 << 31
_LENGTH = Only(-1, instead="max_tokens says how many tokens to generate")
_SHORT_TEXT = Field(max_length=256)


class StreamOptions(Body):
    """What a stream reports in addition to text; without `stream` there is none, and they ask for nothing.

    Attributes:
        include_usage: one more chunk at the end with the usage of the whole request.
        continuous_usage_stats: the usage so far in every chunk.
        include_obfuscation: a text of random length with each delta, which this server does not send.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[None, Only(False, instead="events are not padded")] = None


class SpeculationOptions(Body):
    """How this request is drafted for; what the server has loaded is checked in text/speculation.py.

    Attributes:
        enabled: false = plain decoding.
        method: one of those the server has loaded.
        num_speculative_tokens: drafts per step at most.
    """

    enabled: bool | None = None
    method: str | None = None
    num_speculative_tokens: Annotated[int | None, Integer(1, MAX_COUNT)] = None


class GenerationBody(StructuredFields, SamplingFields):
    """Fields that chat and text completions share, besides those of the two it is made of.

    Attributes:
        max_tokens: None = what the context has room for.
        best_of: only the value of n: nothing is generated to be thrown away.
        priority: lower runs first.
        cache_salt: prompts share cached prefixes only with the same salt.
        metadata: tags, and options that were merged into the other fields; see split_metadata.
        service_tier: of no effect; the answer to a request that names one says which it had.
        user, safety_identifier: who shares the engine with others, where no API keys tell.
        store .. prompt_cache_retention: accepted and of no effect.
        use_beam_search ..: other servers' options, taken with the value that asks for nothing.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    best_of: Annotated[int | None, Integer(1)] = None

    request_id: Annotated[
        str | None, Matching(r"^[A-Za-z0-9._:@/-]{1,128}$", "1..128 letters, digits and characters of ._:@/-")
    ] = None
    priority: Annotated[int | None, Integer(-_PRIORITY_LIMIT, _PRIORITY_LIMIT - 1)] = None
    cache_salt: Annotated[str, _SHORT_TEXT] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_sources: bool | None = None
    collect_metrics: bool | None = None
    speculation: SpeculationOptions | None = None
    include_draft_logprobs: bool | None = None
    metadata: SmallMap | None = None

    service_tier: Annotated[str, _SHORT_TEXT] | None = None
    user: Annotated[str, _SHORT_TEXT] | None = None
    store: Ignored = None
    safety_identifier: Annotated[str, _SHORT_TEXT] | None = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    bad_words_token_ids: NotSupported = None
    logits_processors: NotSupported = None
    logits_processors_args: NotSupported = None
    allowed_token_ids: NotSupported = None
    disaggregate_info: NotSupported = None
    kv_transfer_params: NotSupported = None
    mm_processor_kwargs: NotSupported = None
    vllm_xargs: NotSupported = None
    lora_path: NotSupported = None
    truncate_prompt_tokens: Annotated[None, Only(False, instead="prompts are never cut")] = None

    use_beam_search: Annotated[None, Only(False)] = None
    length_penalty: Annotated[None, Only(1)] = None
    early_stopping: Annotated[None, Only(False)] = None
    skip_special_tokens: Annotated[None, Only(True)] = None
    spaces_between_special_tokens: Annotated[None, Only(True, False)] = None
    cache_prompt: Annotated[None, Only(True, False)] = None  # no token depends on the cache
    n_predict: Annotated[None, _LENGTH] = None
    repeat_penalty: Annotated[None, Only(1, instead="its name is repetition_penalty")] = None
    typical_p: Annotated[None, Only(1)] = None
    top_n_sigma: Annotated[None, Only(-1)] = None
    mirostat: Annotated[None, Only(0)] = None
    dry_multiplier: Annotated[None, Only(0)] = None
    xtc_probability: Annotated[None, Only(0)] = None
    dynatemp_range: Annotated[None, Only(0)] = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def collects_metrics(self) -> bool:
        """Whether the answer tells times that the engine measured."""
        return bool(self.collect_metrics)

    @property
    def tool_use(self) -> ToolUse | None:
        """The functions that may be called, None = none."""
        return None

    @property
    def reasoning_display(self) -> Display | None:
        """How to show what the model thinks; None = it goes on with a text, which has no such part."""
        return None

    @property
    def continues_answer(self) -> bool:
        """Whether the output goes on with an answer that the prompt has begun, after any thinking."""
        return False

    @property
    def max_reasoning_tokens(self) -> int | None:
        """How many tokens the model may think at most, None = no limit of its own."""
        return None

    @property
    def must_limit_reasoning(self) -> bool:
        """Whether such a limit is refused where the server cannot hold it."""
        return True

    @property
    def sent_names(self) -> Mapping[str, str]:
        """The names under which the client sent what SamplingParams and RequestBuilder call otherwise."""
        return {}

    def as_sent(self, error: BadRequest) -> BadRequest:
        """Return an error with the name of the field that the client sent."""
        name = self.sent_names.get(error.param or "")
        if name is None:
            return error
        text = re.sub(rf"^{error.param}(?=[:.\[])", name, error.message)
        return BadRequest(text, param=name, code=error.code)

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the sampling options, `defaults` where the body leaves one open.

        Raises BadRequest: two of them contradict each other.
        """
        raise NotImplementedError

    def contradictions(self) -> list[Fault]:
        try:
            params = self.sampling_params()
        except BadRequest as error:
            told = self.as_sent(error)
            return [Fault(told.message, told.param)]
        faults = []
        if self.include_draft_logprobs and params.logprobs is None:
            name = "include_draft_logprobs"
            faults.append(Fault(f"{name}: expected only with logprobs, got none", name))
        if self.stream and self.prompt_logprobs is not None:
            name = "prompt_logprobs"
            faults.append(Fault(f"{name}: expected only without stream, got both", name, "not_supported"))
        faults += self.structured_faults(params)
        if self.best_of is not None and self.best_of != params.n:
            text = f"best_of: not supported: only the value of n ({params.n}) is, got {shown(self.best_of)}"
            faults.append(Fault(text, "best_of", "not_supported"))
        return faults

    def speculation_options(self, params: SamplingParams) -> dict[str, Any]:
        """Return what was said about drafting, as fields of Speculation; drafts have as many alternatives as tokens."""
        given = {} if self.speculation is None else self.speculation.model_dump(exclude_none=True)
        drafts = {"num_draft_logprobs": params.logprobs} if self.include_draft_logprobs else {}
        sources = {"token_sources": True} if self.return_token_sources else {}
        return {**given, **drafts, **sources}
