"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    Ignored,
    NoTool,
    NotSupported,
    TextModalityOnly,
    expected,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams


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
            return self._build_sampling_params(limits.pop() if limits else None, num_logprobs)
        except BadRequest as error:
            if error.param != "logprobs":
                raise
            raise BadRequest(error.message.replace("logprobs", "top_logprobs", 1), param="top_logprobs") from None
