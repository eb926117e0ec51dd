"""The bodies of Ollama's routes: its fields and `options`, and this server's options by their usual names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    FieldKind,
    Ignored,
    NotSupported,
    Only,
    expected,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody, template_variables
from fastdeploy_sd.entrypoints.openai.protocol.message import MAX_MESSAGES
from fastdeploy_sd.entrypoints.openai.protocol.ollama_message import OllamaMessage, with_call_ids
from fastdeploy_sd.entrypoints.openai.protocol.ollama_options import ONE_TEXT, OllamaOptions
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import NumLogprobs
from fastdeploy_sd.entrypoints.openai.protocol.structured_fields import Asked, below
from fastdeploy_sd.entrypoints.openai.protocol.tools import Tools, tool_use
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.chat_template import Message, PromptEnd
from fastdeploy_sd.text.guidance.grammar import StructuredOutputs
from fastdeploy_sd.text.reasoning_formats import Display
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolUse

_EFFORTS = ("low", "medium", "high", "max")
_UNLOADS = (0, "0", "0s", "0m", "0h")


class _Stream(FieldKind):
    """Whether to stream, which Ollama does unless it is told not to."""

    schema: Mapping[str, Any] = {"type": ["boolean", "null"]}
    takes_null = False

    def convert(self, value: Any) -> bool:
        if not isinstance(value, bool | None):
            raise expected("true or false")
        return value is not False


class _Think(FieldKind):
    """Whether the model is to think first, or how much."""

    schema: Mapping[str, Any] = {"anyOf": [{"type": "boolean"}, {"enum": list(_EFFORTS)}]}

    def convert(self, value: Any) -> bool | str:
        if not isinstance(value, bool) and value not in _EFFORTS:
            raise expected(f"true, false or one of {', '.join(_EFFORTS)}")
        return value  # type: ignore[no-any-return]


class _Format(FieldKind):
    """The form of the text: "json", or a JSON schema."""

    schema: Mapping[str, Any] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}

    def convert(self, value: Any) -> Asked | None:
        if value == "":
            return None
        if value == "json":
            return Asked("", StructuredOutputs(json_object=True))
        if not isinstance(value, dict):
            raise expected('"json" or a JSON schema (an object)')
        return Asked("", StructuredOutputs(json=value))


class OllamaBody(GenerationBody):
    """What /api/chat and /api/generate share.

    Attributes:
        options: they give way to the same names next to it.
        think: true, false or an effort, for the chat template.
        format: "json" or a JSON schema.
        keep_alive: of no effect: the model stays loaded as long as the server runs.
        truncate, shift: of no effect: a prompt that does not fit is refused, and an answer ends with the context.
    """

    stream: Annotated[bool, _Stream()] = True
    options: OllamaOptions | None = None
    format: Annotated[Asked | None, _Format()] = None
    think: Annotated[bool | str | None, _Think()] = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs = None
    keep_alive: Ignored = None
    truncate: bool | None = None
    shift: bool | None = None

    n: Annotated[None, Only(1, instead=ONE_TEXT)] = None
    best_of: Annotated[None, Only(1, instead=ONE_TEXT)] = None
    prompt_logprobs: NotSupported = None
    return_token_ids: Annotated[None, Only(False)] = None
    return_tokens_as_token_ids: Annotated[None, Only(False)] = None
    collect_metrics: Annotated[None, Only(False)] = None
    return_token_sources: Annotated[None, Only(False, instead="they are in /v1/chat/completions")] = None
    include_draft_logprobs: Annotated[None, Only(False, instead="they are in /v1/chat/completions")] = None

    def _asked(self) -> list[Asked]:
        return below("format", self.format) + super()._asked()

    @property
    def is_load(self) -> bool:
        """Whether it asks for no text, but for a model in memory."""
        raise NotImplementedError

    @property
    def turns(self) -> list[Message]:
        """The conversation."""
        raise NotImplementedError

    @property
    def prompt_end(self) -> PromptEnd:
        """Where the prompt ends."""
        return PromptEnd.CONTINUED if self.continues_answer else PromptEnd.TURN

    def raw_prompt(self, has_template: bool) -> str | None:
        """Return the text that is the prompt as it is, None = the turns are; `has_template`: the model has one."""
        return None

    @property
    def text_after(self) -> str | None:
        """What follows the output, "" or None = nothing."""
        return None

    @property
    def num_ctx(self) -> int | None:
        """See OllamaOptions."""
        return None if self.options is None else self.options.num_ctx

    @property
    def collects_metrics(self) -> bool:
        return True

    @property
    def sent_names(self) -> Mapping[str, str]:
        options = OllamaOptions() if self.options is None else self.options
        names = {"logprobs": "top_logprobs"}
        if options.num_predict is not None:
            names["max_tokens"] = "options.num_predict"
        if options.repeat_penalty is not None:
            names["repetition_penalty"] = "options.repeat_penalty"
        return names

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        options = OllamaOptions() if self.options is None else self.options
        max_tokens = options.num_predict if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._build_sampling_params(max_tokens, logprobs, {**defaults, **options.sampling})

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template."""
        effort = self.think if isinstance(self.think, str) else None
        return template_variables(None if self.think is None else self.think is not False, effort, None)

    def contradictions(self) -> list[Fault]:
        faults = super().contradictions()
        if self.top_logprobs is not None and not self.logprobs:
            faults.append(Fault("top_logprobs: expected only with logprobs true, got logprobs false", "top_logprobs"))
        is_unload = self.is_load and not isinstance(self.keep_alive, bool) and self.keep_alive in _UNLOADS
        if is_unload:
            text = "keep_alive: not supported: the model stays loaded as long as the server runs"
            faults.append(Fault(text, "keep_alive", "not_supported"))
        return faults


class OllamaChatBody(OllamaBody):
    """POST /api/chat. Where the last message is the assistant's, the answer goes on with it."""

    messages: Annotated[list[OllamaMessage], FailFast(), Field(max_length=MAX_MESSAGES)] = Field(default=[])
    tools: Annotated[tuple[Tool, ...] | None, Tools()] = None

    @property
    def is_load(self) -> bool:
        return not self.messages

    @property
    def turns(self) -> list[Message]:
        return with_call_ids([message.as_turn() for message in self.messages])

    @property
    def tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, None, None)

    @property
    def continues_answer(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and not last.calls and bool(last.content)

    @property
    def reasoning_display(self) -> Display:
        return Display.STREAMED

    @property
    def sent_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", **super().sent_names}


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate.

    Attributes:
        system: a system message in front of the prompt.
        suffix: what follows the answer, for models with marks for filling in the middle.
        raw: the prompt is for no chat template, as it is where the model has none; control tokens written in it act.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: NotSupported = None
    context: Annotated[None, Only([], instead="send the conversation to /api/chat")] = None
    images: NotSupported = None

    @property
    def is_load(self) -> bool:
        return not self.prompt and not self.suffix

    @property
    def turns(self) -> list[Message]:
        first = [Message("system", self.system)] if self.system else []
        return [*first, Message("user", self.prompt or "")]

    def raw_prompt(self, has_template: bool) -> str | None:
        is_raw = self.raw or self.suffix or not (has_template or self.system)
        return self.prompt or "" if is_raw else None

    @property
    def text_after(self) -> str | None:
        return self.suffix

    @property
    def reasoning_display(self) -> Display | None:
        return None if self.raw or self.suffix else Display.STREAMED

    @property
    def sent_names(self) -> Mapping[str, str]:
        return {"messages": "prompt", "prompt_token_ids": "prompt", **super().sent_names}

    def contradictions(self) -> list[Fault]:
        faults = super().contradictions()
        name = "raw" if self.raw else "suffix"
        if self.system and (self.raw or self.suffix):
            faults.append(Fault(f"system: expected only without {name}, got both", "system"))
        return faults


class OllamaShowBody(Body):
    """POST /api/show.

    Attributes:
        name: the older name of `model`.
        verbose: of no effect: an answer has no tensors.
    """

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: NotSupported = None
    template: NotSupported = None
    options: NotSupported = None
