"""The body of /v1/messages: Anthropic's fields for one turn, and this server's options by their usual names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from fastdeploy_sd.entrypoints.openai.protocol.anthropic_turns import (
    AnthropicChoice,
    AnthropicTools,
    SystemText,
    Turns,
)
from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    FieldKind,
    Ignored,
    NotSupported,
    Only,
    Sampling,
    expected,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody, TemplateText, template_variables
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import MaxTokens
from fastdeploy_sd.entrypoints.openai.protocol.structured_fields import Asked, below
from fastdeploy_sd.entrypoints.openai.protocol.tools import ToolChoice, tool_faults, tool_use
from fastdeploy_sd.rules.sampling import MAX_COUNT, MAX_STOP_STRINGS, SOME_TOKENS
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.chat_template import Message, PromptEnd
from fastdeploy_sd.text.guidance.grammar import StructuredOutputs
from fastdeploy_sd.text.reasoning_formats import Display
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolUse

_STOP_SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS}
_MAX_TOKENS_SCHEMA = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
_ONE_TEXT = "a message has one text"


class _Thinking(FieldKind):
    """How the model is to think: whether (None = as the chat template has it), and for at most how many tokens."""

    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "type": {"enum": ["enabled", "disabled", "adaptive"]},
            "budget_tokens": {"type": ["integer", "null"], "minimum": 1},
        },
        "required": ["type"],
    }

    def convert(self, value: Any) -> tuple[bool | None, int | None]:
        given = value if isinstance(value, dict) else {}
        budget = given.get("budget_tokens")
        is_budget = budget is None or (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0)
        wants = {"enabled": True, "disabled": False, "adaptive": None}
        if given.get("type") not in wants or not is_budget:
            raise expected('{"type": "enabled", "budget_tokens": N}, {"type": "disabled"} or {"type": "adaptive"}')
        return wants[given["type"]], budget


class _MaxTokens(Sampling):
    """How many tokens to generate at most, which must be said."""

    takes_null = False

    def __init__(self) -> None:
        super().__init__("max_tokens", _MAX_TOKENS_SCHEMA, rule=SOME_TOKENS)

    def convert(self, value: Any) -> Any:
        if value is None:
            raise expected("an integer of at least 1")
        return super().convert(value)


class _StopSequences(Sampling):
    """Texts that end the answer."""

    def __init__(self) -> None:
        super().__init__("stop", _STOP_SCHEMA)

    def convert(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise expected("a list of texts")
        return super().convert(value)


class _OutputFormat(FieldKind):
    """A JSON schema that the text follows."""

    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
        "required": ["type", "schema"],
        "additionalProperties": False,
    }

    def convert(self, value: Any) -> Asked:
        is_known = isinstance(value, dict) and value.keys() == {"type", "schema"} and value["type"] == "json_schema"
        if not is_known or not isinstance(value["schema"], dict):
            raise expected('{"type": "json_schema", "schema": ...}')
        return Asked(".schema", StructuredOutputs(json=value["schema"]))


class OutputConfig(Body):
    """How the answer is to be.

    Attributes:
        effort: the variable reasoning_effort of the chat template.
        format: the form of the text.
    """

    effort: TemplateText = None
    format: Annotated[Asked | None, _OutputFormat()] = None
    task_budget: NotSupported = None


class MessagesBody(GenerationBody):
    """POST /v1/messages.

    Attributes:
        messages: after validation turns; where the last is the assistant's, the answer goes on with it.
        system: a system message in front of them.
        thinking: budget_tokens holds where the server knows how its model marks thinking.
        output_format: the older name of output_config.format.
    """

    max_tokens: Annotated[int, _MaxTokens()]
    messages: Annotated[tuple[Message, ...], Turns()]
    system: Annotated[str | None, SystemText()] = None
    stop_sequences: Annotated[Any, _StopSequences()] = None
    thinking: Annotated[tuple[bool | None, int | None] | None, _Thinking()] = None
    tools: Annotated[tuple[Tool, ...] | None, AnthropicTools()] = None
    tool_choice: Annotated[tuple[ToolChoice, bool] | None, AnthropicChoice()] = None

    cache_control: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    diagnostics: Ignored = None
    context_management: NotSupported = None
    container: NotSupported = None
    mcp_servers: NotSupported = None
    output_config: OutputConfig | None = None
    output_format: Annotated[Asked | None, _OutputFormat()] = None

    n: Annotated[None, Only(1, instead=_ONE_TEXT)] = None
    best_of: Annotated[None, Only(1, instead=_ONE_TEXT)] = None
    stop: Annotated[None, Only([], instead="its name here is stop_sequences")] = None
    prompt_logprobs: NotSupported = None
    include_draft_logprobs: Annotated[None, Only(False, instead="they are in /v1/chat/completions")] = None
    return_token_sources: Annotated[None, Only(False, instead="they are in /v1/chat/completions")] = None

    @property
    def turns(self) -> list[Message]:
        """The conversation, with what the system says in front."""
        return [*([] if self.system is None else [Message("system", self.system)]), *self.messages]

    @property
    def continues_answer(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls and bool(last.content)

    @property
    def prompt_end(self) -> PromptEnd:
        """Where the prompt ends."""
        return PromptEnd.CONTINUED if self.continues_answer else PromptEnd.TURN

    @property
    def tool_use(self) -> ToolUse | None:
        choice, is_parallel = self.tool_choice or (None, True)
        return tool_use(self.tools, choice, is_parallel)

    @property
    def reasoning_display(self) -> Display:
        return Display.STREAMED

    @property
    def max_reasoning_tokens(self) -> int | None:
        return None if self.thinking is None or self.thinking[0] is False else self.thinking[1]

    @property
    def must_limit_reasoning(self) -> bool:
        return False

    @property
    def sent_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "stop": "stop_sequences", "reasoning_max_tokens": "thinking"}

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        params = self._build_sampling_params(self.max_tokens, None, defaults)
        return replace(params, stop=tuple(self.stop_sequences or ()))

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template."""
        effort = None if self.output_config is None else self.output_config.effort
        return template_variables(None if self.thinking is None else self.thinking[0], effort, None)

    def _asked(self) -> list[Asked]:
        form = None if self.output_config is None else self.output_config.format
        own = below("output_config.format", form) + below("output_format", self.output_format)
        return own + super()._asked()

    def contradictions(self) -> list[Fault]:
        choice = None if self.tool_choice is None else self.tool_choice[0]
        return super().contradictions() + tool_faults(("tools", "tool_choice"), self.tools, choice)


class CountTokensBody(MessagesBody):
    """POST /v1/messages/count_tokens: a prompt is counted, and nothing is generated."""

    max_tokens: MaxTokens = None  # type: ignore[assignment]
