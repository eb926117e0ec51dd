"""The options of a body that its answer depends on; the rest of the body is dropped once the job is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from fastdeploy_sd.entrypoints.openai.protocol import CompletionBody, GenerationBody, InfillBody, ResponseBody
from fastdeploy_sd.text.answer_parser import AnswerParser
from fastdeploy_sd.text.line_limits import LineLimits
from fastdeploy_sd.text.reasoning import make_splitter
from fastdeploy_sd.text.reasoning_formats import ReasoningOptions
from fastdeploy_sd.text.tool_calls.formats import ToolOptions


@dataclass(frozen=True, slots=True)
class ResponseEcho:
    """What a Response repeats of its request.

    Attributes:
        text_format, tools, tool_choice: as JSON text, since they are of any form.
    """

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    reasoning_effort: str | None = None
    verbosity: str | None = None
    text_format: str = '{"type": "text"}'
    tools: str = "[]"
    tool_choice: str = '"auto"'
    parallel_tool_calls: bool = True

    @classmethod
    def of(cls, body: ResponseBody) -> Self:
        """Read it from a body."""
        tags = {name: value for name, value in (body.metadata or {}).items() if isinstance(value, str)}
        text_format = None if body.text is None else body.text.format
        return cls(
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=tags,
            reasoning_effort=body.reasoning_effort,
            verbosity=body.verbosity,
            text_format=json.dumps({"type": "text"} if text_format is None else text_format.definition),
            tools=json.dumps([tool.flat_definition for tool in body.tools or ()]),
            tool_choice=json.dumps("auto" if body.tool_choice is None else body.tool_choice.flat),
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """The form of embeddings; `dimensions`: how many numbers, None = all."""

    dimensions: int | None = None
    is_base64: bool = False


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The form of an answer. It goes to other processes.

    Attributes:
        tells_service_tier: the request named one.
        response: of /v1/responses only. embedding: of embeddings only.
        num_prompt_logprobs: alternatives for each token of the prompt in a field of its own, None = no such field.
        line_limits, fields: of /infill only; `fields` are those of the answer, none = all.
        shown_ids: of tokens that text hides otherwise, but that mean something to the parsers of its parts.
    """

    stream: bool = False
    includes_usage: bool = False
    includes_continuous_usage: bool = False
    returns_token_ids: bool = False
    names_token_ids: bool = False
    returns_token_sources: bool = False
    includes_draft_logprobs: bool = False
    collects_metrics: bool = False
    echo: bool = False
    num_prompt_logprobs: int | None = None
    tells_service_tier: bool = False
    response: ResponseEcho | None = None
    embedding: EmbeddingOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: ToolOptions | None = None
    line_limits: LineLimits | None = None
    fields: tuple[str, ...] = ()
    shown_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, body: GenerationBody) -> Self:
        """Read them from a body."""
        return cls(
            stream=bool(body.stream),
            includes_usage=body.includes_usage,
            includes_continuous_usage=body.includes_continuous_usage,
            returns_token_ids=bool(body.return_token_ids),
            names_token_ids=bool(body.return_tokens_as_token_ids),
            returns_token_sources=bool(body.return_token_sources),
            includes_draft_logprobs=bool(body.include_draft_logprobs),
            collects_metrics=body.collects_metrics,
            tells_service_tier=body.service_tier is not None,
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            num_prompt_logprobs=body.prompt_logprobs,
            response=ResponseEcho.of(body) if isinstance(body, ResponseBody) else None,
            line_limits=body.line_limits if isinstance(body, InfillBody) else None,
            fields=tuple(body.response_fields or ()) if isinstance(body, InfillBody) else (),
        )

    def ending_parser(self) -> AnswerParser | None:
        """Return what finds the end of one choice's text, None = there is none to find."""
        return None if self.tools is None else self.parser()

    def parser(self) -> AnswerParser:
        """Return what finds the parts of one choice's text."""
        return AnswerParser(
            None if self.reasoning is None else make_splitter(self.reasoning),
            None if self.tools is None else self.tools.parser(),
        )
