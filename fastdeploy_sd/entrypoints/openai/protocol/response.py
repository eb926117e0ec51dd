"""The body of /v1/responses: OpenAI's fields for one turn, and this server's sampling options by their usual names.

Nothing is stored here, so what refers to something stored is refused, and `store` reads false in every Response.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    FieldKind,
    Ignored,
    NotSupported,
    Only,
    SmallMap,
    expected,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import (
    GenerationBody,
    StreamOptions,
    TemplateText,
    template_variables,
)
from fastdeploy_sd.entrypoints.openai.protocol.response_items import Items
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import MaxTokens, NumLogprobs
from fastdeploy_sd.entrypoints.openai.protocol.structured_fields import Asked, FlatFormat, TextFormat, below
from fastdeploy_sd.entrypoints.openai.protocol.tools import ToolChoice, ToolChoiceField, Tools, tool_faults, tool_use
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.reasoning_formats import Display
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolUse

# What `include` may name: parts of items that no Response of this server has.
_ABSENT = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDE_SCHEMA = {"type": "array", "items": {"enum": [_LOGPROBS, *_ABSENT]}}
_ONE_TEXT = "a Response has one text"
# Refers to something that a server has kept.
_Stored = Annotated[None, Only("", instead="nothing is stored: give the whole conversation in input")]


class _Include(FieldKind):
    """Parts of items to add; the body holds whether log-probabilities are one. Others exist nowhere here."""

    schema = _INCLUDE_SCHEMA

    def convert(self, value: Any) -> bool:
        if not isinstance(value, list):
            raise expected("a list")
        if not all(name in (_LOGPROBS, *_ABSENT) for name in value):
            raise expected(f"some of {', '.join((_LOGPROBS, *_ABSENT))}")
        return _LOGPROBS in value


class Reasoning(Body):
    """How the model is to think.

    Attributes:
        effort: the variable reasoning_effort of the chat template.
        summary, generate_summary: there is none, which is what "auto" may come to.
        context, mode: what a server without choices has.
    """

    effort: TemplateText = None
    summary: Annotated[None, Only("auto")] = None
    generate_summary: Annotated[None, Only("auto")] = None
    context: Annotated[None, Only("auto", instead="which of it a later turn shows is up to the chat template")] = None
    mode: Annotated[None, Only("standard")] = None


class TextOptions(Body):
    """The form of the text.

    Attributes:
        format: what response_format is elsewhere, with the schema and its name next to the type.
        verbosity: the variable of that name of the chat template.
    """

    format: Annotated[TextFormat | None, FlatFormat()] = None
    verbosity: TemplateText = None


class ResponseStreamOptions(StreamOptions):
    """Of a stream of Responses, whose last event always has the usage."""

    continuous_usage_stats: Annotated[None, Only(False, instead="the last event has the usage")] = None


class ResponseBody(GenerationBody):
    """POST /v1/responses.

    Attributes:
        input: a text or the items of a conversation; after validation turns.
        instructions: a system message in front of them.
        chat_template_kwargs, enable_thinking, tools, tool_choice, parallel_tool_calls: as in a chat completion.
        include, top_logprobs: log-probabilities of a message's tokens, and of so many alternatives.
        previous_response_id, conversation, prompt: kept by a server, which this one does not.
    """

    input: Annotated[tuple[Message, ...], Items()]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    chat_template_kwargs: SmallMap | None = None
    enable_thinking: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    tools: Annotated[tuple[Tool, ...] | None, Tools(is_flat=True)] = None
    tool_choice: Annotated[ToolChoice | None, ToolChoiceField(is_flat=True)] = None
    parallel_tool_calls: bool | None = None

    max_tool_calls: Ignored = None
    prompt_cache_options: Ignored = None
    access_programs: Ignored = None
    background_options: Ignored = None
    image: Ignored = None
    previous_response_id: _Stored = None
    conversation: _Stored = None
    prompt: _Stored = None
    prompt_logprobs: NotSupported = None
    background: Annotated[None, Only(False, instead="a Response is answered at once, or as a stream")] = None
    truncation: Annotated[None, Only("disabled", instead="prompts are never cut")] = None
    include: Annotated[bool | None, _Include()] = None
    top_logprobs: NumLogprobs = None
    moderation: NotSupported = None
    context_management: NotSupported = None

    n: Annotated[None, Only(1, instead=_ONE_TEXT)] = None
    best_of: Annotated[None, Only(1, instead=_ONE_TEXT)] = None
    messages: Annotated[None, Only([], instead="its name here is input")] = None
    max_tokens: Annotated[None, Only(-1, instead="its name here is max_output_tokens")] = None
    response_format: Annotated[None, Only({"type": "text"}, instead="text.format says it")] = None
    return_token_ids: Annotated[None, Only(False)] = None
    return_tokens_as_token_ids: Annotated[None, Only(False)] = None
    collect_metrics: Annotated[None, Only(False)] = None
    include_draft_logprobs: Annotated[None, Only(False, instead="they are in /v1/chat/completions")] = None
    return_token_sources: Annotated[None, Only(False, instead="they are in /v1/chat/completions")] = None

    def _asked(self) -> list[Asked]:
        form = None if self.text is None else self.text.format
        return below("text.format", None if form is None else form.asked) + super()._asked()

    @property
    def turns(self) -> list[Message]:
        """The conversation, its instructions in front."""
        first = [] if self.instructions is None else [Message("system", self.instructions)]
        return [*first, *self.input]

    @property
    def reasoning_effort(self) -> str | None:
        """How much the model is to think."""
        return self.reasoning.effort if self.reasoning else None

    @property
    def verbosity(self) -> str | None:
        """How long the text is to be."""
        return self.text.verbosity if self.text else None

    @property
    def tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def contradictions(self) -> list[Fault]:
        faults = super().contradictions() + tool_faults(("tools", "tool_choice"), self.tools, self.tool_choice)
        if self.top_logprobs and not self.include:
            text = f"top_logprobs: expected only with {_LOGPROBS} in include, got none"
            faults.append(Fault(text, "top_logprobs"))
        return faults

    @property
    def reasoning_display(self) -> Display:
        return Display.STREAMED

    @property
    def sent_names(self) -> Mapping[str, str]:
        return {
            "prompt": "input",
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.include else None
        return self._build_sampling_params(self.max_output_tokens, logprobs, defaults)

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template."""
        fields = template_variables(self.enable_thinking, self.reasoning_effort, self.verbosity)
        return fields | (self.chat_template_kwargs or {})
