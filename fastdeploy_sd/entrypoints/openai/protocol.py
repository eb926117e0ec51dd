"""The bodies of /v1/chat/completions and /v1/completions: OpenAI's fields, and FastDeploy's extensions.

This and SamplingParams are where a request is validated: here shapes and combinations, there the range of every
sampling option (so those are `Any` here, and the server and LLM say the same about a wrong value). What depends on the
loaded model is checked in text/request_builder.py.

Defaults are OpenAI's (temperature 1, top_p 1); a checkpoint's generation_config does not change them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from fastdeploy_sd.entrypoints.openai.fields import (
    Body,
    Ignored,
    NoTool,
    NotSupported,
    TextFormatOnly,
    TextModalityOnly,
    expected,
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
MAX_PROMPTS = 1024


class StreamOptions(Body):
    """What a stream reports beside text.

    Attributes:
        include_usage: one more chunk at the end with the usage of the whole request.
        continuous_usage_stats: the usage so far in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields that chat and text completions share.

    Attributes:
        model: the served name; None = the one there is.
        request_id: id of the response and of the engine's request; None = made up.
        priority: lower runs first.
        cache_salt: prompts share cached prefixes only with the same salt.
        return_token_ids: add prompt_token_ids and completion_token_ids to each choice.
        collect_metrics: add `metrics` to each choice.
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

    def _sampling_params(self, max_tokens: int | None, logprobs: object) -> SamplingParams:
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams.from_dict({**values, "max_tokens": max_tokens, "logprobs": logprobs})


# ---- chat -----------------------------------------------------------------------------------------------------------


def _content_text(value: object) -> object:
    """Turn a list of text parts into their text, one line break between two of them."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        is_text = isinstance(part, dict) and part.get("type") == "text" and set(part) == {"type", "text"}
        if not is_text or not isinstance(part["text"], str):
            raise expected('text or a list of {"type": "text", "text": ...} parts (images and audio are not supported)')
        texts.append(part["text"])
    return "\n".join(texts)


def _verify_scalars(value: object) -> object:
    scalar = str | int | float | bool | None
    if isinstance(value, dict) and not all(isinstance(v, scalar) for v in value.values()):
        raise expected("a map of names to text, numbers, true, false or null")
    return value


class ChatMessage(Body):
    """One turn of a conversation.

    Attributes:
        role: system, developer (the same as system), user or assistant.
    """

    role: str
    content: Annotated[str, BeforeValidator(_content_text)]
    name: str | None = None
    refusal: NotSupported = None
    audio: NotSupported = None
    tool_calls: NotSupported = None
    function_call: NotSupported = None
    tool_call_id: NotSupported = None
    reasoning_content: NotSupported = None


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions.

    Attributes:
        max_tokens: OpenAI's older name of max_completion_tokens.
        prompt_token_ids: the prompt instead of messages, which must then be empty.
        disable_chat_template: the single message is the raw prompt; control tokens written in it act.
        chat_template_kwargs: extra variables of the checkpoint's chat template, scalars.
    """

    messages: list[ChatMessage] = Field(default=[])
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    disable_chat_template: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_verify_scalars)] = None

    parallel_tool_calls: Ignored = None
    tool_choice: NoTool = None
    modalities: TextModalityOnly = None
    tools: NotSupported = None
    functions: NotSupported = None
    function_call: NoTool = None
    audio: NotSupported = None
    prediction: NotSupported = None
    reasoning_effort: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None
    chat_template: NotSupported = None
    reasoning_max_tokens: NotSupported = None
    response_max_tokens: NotSupported = None
    include_draft_logprobs: NotSupported = None
    max_streaming_response_tokens: NotSupported = None
    completion_token_ids: NotSupported = None
    mm_hashes: NotSupported = None

    @model_validator(mode="after")
    def _verify_prompt(self) -> Self:
        if self.prompt_token_ids is not None and self.messages:
            raise BadRequest(
                f"prompt_token_ids: expected messages to be empty beside it, got {len(self.messages)}",
                param="prompt_token_ids",
            )
        if self.prompt_token_ids is None and not self.messages:
            raise BadRequest("messages: expected at least one message, got none", param="messages")
        if self.disable_chat_template and len(self.messages) != 1:
            raise BadRequest(
                "disable_chat_template: expected exactly one message, whose content is the prompt, got"
                f" {len(self.messages)}",
                param="disable_chat_template",
            )
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the validated sampling options.

        Raises:
            BadRequest: a value is out of range, or options contradict each other.
        """
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise BadRequest(
                f"max_tokens: expected the value of max_completion_tokens ({self.max_completion_tokens}), got"
                f" {self.max_tokens}",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs: expected only with logprobs true, got logprobs false", param="top_logprobs")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        try:
            return self._sampling_params(limits.pop() if limits else None, num_logprobs)
        except BadRequest as error:
            if error.param != "logprobs":
                raise
            raise BadRequest(error.message.replace("logprobs", "top_logprobs", 1), param="top_logprobs") from None


# ---- text completions -----------------------------------------------------------------------------------------------

Prompt = str | list[int]


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _prompt_list(value: object) -> object:
    """Turn every accepted form into a list of prompts."""
    if value is None:
        return None
    prompts = [value] if isinstance(value, str) or (value and _is_token_ids(value)) else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise expected(f"a string, token ids, or a list of 1..{MAX_PROMPTS} of either")
    if not (all(isinstance(p, str) for p in prompts) or all(_is_token_ids(p) for p in prompts)):
        raise expected("a string, token ids (integers), or a list of either")
    return prompts


class CompletionBody(GenerationBody):
    """POST /v1/completions.

    Attributes:
        prompt: one or several prompts, as text or token ids; after validation always a list.
        prompt_token_ids: the same as token ids in `prompt`, which must then be absent.
        echo: put the prompt before the generated text.
        best_of: only the value of n: nothing is generated to be thrown away.
    """

    prompt: Annotated[list[Prompt] | None, BeforeValidator(_prompt_list)] = None
    prompt_token_ids: Annotated[list[Prompt] | None, BeforeValidator(_prompt_list)] = None
    echo: bool | None = None
    logprobs: Any = None
    best_of: int | None = None

    suffix: NotSupported = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, in whichever of the two fields they came."""
        return self.prompt or self.prompt_token_ids or []

    @model_validator(mode="after")
    def _verify_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            got = "neither" if self.prompt is None else "both"
            raise BadRequest(f"prompt: expected either prompt or prompt_token_ids, got {got}", param="prompt")
        if self.prompt_token_ids is not None and any(isinstance(p, str) for p in self.prompt_token_ids):
            raise BadRequest("prompt_token_ids: expected token ids, got text", param="prompt_token_ids")
        if self.echo and self.logprobs is not None:
            raise BadRequest("echo: logprobs of prompt tokens are not supported; expected one of the two", param="echo")
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the validated sampling options.

        Raises:
            BadRequest: a value is out of range, or options contradict each other.
        """
        params = self._sampling_params(self.max_tokens, self.logprobs)
        if self.best_of is not None and self.best_of != params.n:
            raise BadRequest(f"best_of: expected the value of n ({params.n}), got {self.best_of}", param="best_of")
        return params
