"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    FieldKind,
    Ignored,
    Integer,
    NotSupported,
    Only,
    SmallMap,
    TokenIds,
    expected,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody, TemplateText, template_variables
from fastdeploy_sd.entrypoints.openai.protocol.message import (
    MAX_MESSAGES,
    ChatMessage,
    PromptEndFields,
    prompt_end_faults,
)
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import MaxTokens, NumLogprobs
from fastdeploy_sd.entrypoints.openai.protocol.tools import (
    FunctionCallField,
    ToolChoice,
    ToolChoiceField,
    Tools,
    tool_faults,
    tool_use,
)
from fastdeploy_sd.errors import shown
from fastdeploy_sd.rules.sampling import MAX_COUNT
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.reasoning_formats import Display
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolUse

_PREDICTION_TEXT = {"type": "string"}
_PREDICTION_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _PREDICTION_TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_PREDICTION_CONTENT = {"anyOf": [_PREDICTION_TEXT, {"type": "array", "items": _PREDICTION_PART}]}
_PREDICTION_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "content"}, "content": _PREDICTION_CONTENT},
    "required": ["type", "content"],
    "additionalProperties": False,
}


class Prediction(FieldKind):
    """A text, or text parts, which follow each other as they are."""

    schema = _PREDICTION_SCHEMA

    def convert(self, value: Any) -> str:
        content = value.get("content") if isinstance(value, dict) else None
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        is_known = isinstance(value, dict) and value.keys() == {"type", "content"} and value["type"] == "content"
        if not is_known or not isinstance(parts, list) or not all(map(_is_text_part, parts)):
            raise expected('{"type": "content", "content": text or a list of {"type": "text", "text": ...} parts}')
        return "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.keys() == {"type", "text"}
    return is_part and part["type"] == "text" and isinstance(part["text"], str)


_THINKING = ("enabled", "disabled")
_REASONING_LIMITS = ("reasoning_max_tokens", "thinking_token_budget")
_THINKING_SCHEMA = {
    "anyOf": [
        {"type": "boolean"},
        {"type": "object", "properties": {"type": {"enum": list(_THINKING)}}, "required": ["type"]},
    ]
}


class _Thinking(FieldKind):
    """Whether the model is to think first: true and false, or as an object with the type enabled or disabled."""

    schema = _THINKING_SCHEMA

    def convert(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in _THINKING:
            raise expected('true, false, {"type": "enabled"} or {"type": "disabled"}')
        return bool(kind == "enabled")


class ChatCompletionBody(PromptEndFields, GenerationBody):
    """POST /v1/chat/completions.

    Attributes:
        max_tokens: OpenAI's older name of max_completion_tokens, which counts when both are given.
        prompt_token_ids: the prompt instead of messages, which must then be empty.
        disable_chat_template: the single message is the raw prompt; control tokens written in it act.
        chat_template_kwargs: extra variables of the checkpoint's chat template.
        prediction: what the answer is expected to be, to draft from.
        enable_thinking, thinking, reasoning_effort, verbosity: such variables, too, by their own names.
        reasoning_max_tokens: of the thinking, marks not counted; then it is over.
        thinking_token_budget: vLLM's name of it; both may be given where they are equal.
        include_reasoning: false = what the model thinks is left out.
        separate_reasoning: false = it stays in the content, marks and all.
        stream_reasoning: false = a stream has it in one piece, when the thinking is over.
        tools, tool_choice, parallel_tool_calls: functions that the model may or must call; see tools.py.
        functions, function_call: OpenAI's older names of the first two; at most one is called.
    """

    messages: Annotated[list[ChatMessage], FailFast(), Field(max_length=MAX_MESSAGES)] = Field(default=[])
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs = None
    prompt_token_ids: Annotated[list[int] | None, TokenIds()] = None
    disable_chat_template: bool | None = None
    chat_template_kwargs: SmallMap | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[bool | None, _Thinking()] = None
    reasoning_effort: TemplateText = None
    verbosity: TemplateText = None
    reasoning_max_tokens: Annotated[int | None, Integer(0, MAX_COUNT)] = None
    thinking_token_budget: Annotated[int | None, Integer(0, MAX_COUNT)] = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    prediction: Annotated[str | None, Prediction()] = None

    tools: Annotated[tuple[Tool, ...] | None, Tools()] = None
    tool_choice: Annotated[ToolChoice | None, ToolChoiceField()] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[tuple[Tool, ...] | None, Tools(is_bare=True)] = None
    function_call: Annotated[ToolChoice | None, FunctionCallField()] = None
    modalities: Annotated[None, Only(["text"])] = None
    audio: NotSupported = None
    web_search_options: Annotated[None, Only(False, instead="this server does not search the web")] = None
    moderation: NotSupported = None
    prompt_cache_options: Ignored = None
    chat_template: NotSupported = None
    documents: NotSupported = None
    response_max_tokens: NotSupported = None
    max_streaming_response_tokens: NotSupported = None
    completion_token_ids: NotSupported = None
    mm_hashes: NotSupported = None
    add_special_tokens: Annotated[None, Only(False)] = None

    def contradictions(self) -> list[Fault]:
        faults = super().contradictions()
        num_messages = len(self.messages)
        if self.prompt_token_ids is not None and num_messages:
            text = f"prompt_token_ids: expected messages to be empty with it, got {num_messages}"
            faults.append(Fault(text, "prompt_token_ids"))
        elif self.prompt_token_ids is None and not num_messages:
            faults.append(Fault("messages: expected at least one message, got none", "messages"))
        elif self.disable_chat_template and num_messages != 1:
            text = (
                f"disable_chat_template: expected exactly one message, whose content is the prompt, got {num_messages}"
            )
            faults.append(Fault(text, "disable_chat_template"))
        if self.top_logprobs is not None and not self.logprobs:
            faults.append(Fault("top_logprobs: expected only with logprobs true, got logprobs false", "top_logprobs"))
        faults += tool_faults(("tools", "tool_choice"), self.tools, self.tool_choice)
        faults += tool_faults(("functions", "function_call"), self.functions, self.function_call)
        if self.tools and self.functions:
            faults.append(Fault("functions: expected only without tools, got both", "functions"))
        is_raw = self.prompt_token_ids is not None or self.disable_chat_template
        faults += prompt_end_faults(self, [] if is_raw else self.messages)
        return faults + self._reasoning_limit_faults()

    def _reasoning_limit_faults(self) -> list[Fault]:
        given = {name: limit for name in _REASONING_LIMITS if (limit := getattr(self, name)) is not None}
        if not given:
            return []
        (first, limit), (last, other) = next(iter(given.items())), list(given.items())[-1]
        if limit != other:
            return [Fault(f"{last}: expected the value of {first} ({limit}), got {other}", last)]
        # It is held by a grammar, which says where the output ends.
        unfit = [
            (name, wanted) for name, wanted in (("ignore_eos", "false"), ("min_tokens", "0")) if getattr(self, name)
        ]
        return [Fault(f"{n}: expected {w} with {first}, got {shown(getattr(self, n))}", n) for n, w in unfit]

    @property
    def tool_use(self) -> ToolUse | None:
        if self.functions:
            return tool_use(self.functions, self.function_call, is_parallel=False)
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def reasoning_display(self) -> Display:
        if self.separate_reasoning is False:
            return Display.UNSPLIT
        if self.include_reasoning is False:
            return Display.HIDDEN
        return Display.AT_ONCE if self.stream_reasoning is False else Display.STREAMED

    @property
    def continues_answer(self) -> bool:
        return bool(self.continue_final_message and self.messages[-1].content)

    @property
    def max_reasoning_tokens(self) -> int | None:
        return self.thinking_token_budget if self.reasoning_max_tokens is None else self.reasoning_max_tokens

    @property
    def sent_names(self) -> Mapping[str, str]:
        names = {"prompt": "messages" if self.prompt_token_ids is None else "prompt_token_ids"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.reasoning_max_tokens is None:
            names["reasoning_max_tokens"] = "thinking_token_budget"
        return names

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._build_sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None, defaults)

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template; chat_template_kwargs counts before the fields."""
        thinking = self.thinking if self.enable_thinking is None else self.enable_thinking
        given = template_variables(thinking, self.reasoning_effort, self.verbosity)
        return given | (self.chat_template_kwargs or {})
