"""Conversations of LLM.chat, read as the server reads a body, and the parts of their answers. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.answer_forms import AnswerForms
from fastdeploy_sd.entrypoints.openai.answer_options import AnswerOptions
from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, parse_body
from fastdeploy_sd.entrypoints.openai.tool_calling import offered_tools
from fastdeploy_sd.errors import BadRequest, suggest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.answer_parts import PartsDelta, tool_call_id
from fastdeploy_sd.text.output_processor import Completion, OutputProcessor
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import Request

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a call of LLM.chat says in the words of a chat completion, None = nothing; see docs/http_api.md."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls.

    Attributes:
        arguments: JSON text; incomplete where the output was cut off.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """An answer in its parts, as the server shows them.

    Attributes:
        reasoning: what it thought before, "" = nothing, or the model marks no thinking.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_turn(self) -> dict[str, Any]:
        """Return the message as the next call of LLM.chat takes it."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return turn


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation, validated and rendered."""

    body: ChatCompletionBody
    token_ids: Sequence[int]


class AnswerReader:
    """Finds the text and the parts of the completions of one prompt; without `options` they have no parts."""

    def __init__(self, options: AnswerOptions | None) -> None:
        self._options = options

    def processor(self, request: Request, tokenizer: Tokenizer) -> OutputProcessor:
        """Return what makes text of the outputs of one request."""
        if self._options is None:
            return OutputProcessor(request, tokenizer)
        return OutputProcessor(request, tokenizer, self._options.shown_ids, self._options.ending_parser())

    def messages(self, request_id: str, completions: Sequence[Completion]) -> list[ChatMessage]:
        """Return the completions of a request as messages, none where they have no parts."""
        return [] if self._options is None else [_parts(self._options, request_id, one) for one in completions]


class Conversations:
    """Conversations with one model; arguments as for AnswerForms."""

    def __init__(
        self,
        encoder: PromptEncoder,
        config: Config,
        eos_token_ids: Iterable[int],
        verify_grammar: Callable[[str, str], None],
    ) -> None:
        self._encoder = encoder
        self._forms = AnswerForms(encoder, config, eos_token_ids, verify_grammar)

    def read(
        self, conversation: Sequence[Any], options: ChatOptions, kwargs: Mapping[str, Any], max_tokens: int
    ) -> ReadConversation:
        """Validate and render a conversation.

        `max_tokens`: of the prompt. Raises BadRequest: naming what is wrong with it or with what is said about
        functions.
        """
        body = _body(conversation, options)
        turns = [message.as_turn() for message in body.messages]
        offered = offered_tools(body.tool_use)
        return ReadConversation(body, self._encoder.encode_chat(turns, kwargs, max_tokens, offered, body.prompt_end))

    def form(
        self, conversation: ReadConversation | None, params: SamplingParams, asked: str
    ) -> tuple[AnswerReader, str]:
        """Return what reads the answers, and the grammar of the whole output; answers of raw prompts have no parts."""
        if conversation is None:
            return AnswerReader(None), asked
        options, grammar = self._forms.of(conversation.body, params, conversation.token_ids, asked)
        return AnswerReader(options), grammar


def _parts(options: AnswerOptions, request_id: str, completion: Completion) -> ChatMessage:
    parser = options.parser()
    parts = PartsDelta.of(parser.push(completion.text) + parser.finish())
    calls = [
        ToolCall(tool_call_id(request_id, completion.index, call.index), call.name or "", call.arguments)
        for call in parts.tool_calls
    ]
    return ChatMessage(parts.content, parts.reasoning, tuple(calls))


def _body(conversation: Sequence[Any], options: ChatOptions) -> ChatCompletionBody:
    asked = {option.name: getattr(options, option.name) for option in dataclass_fields(options)}
    fields = {"messages": [_message(message) for message in conversation], **asked}
    try:
        content = json.dumps(fields, default=_as_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"messages, tools: expected what JSON can say, got {error}", param="messages") from None
    return parse_body(ChatCompletionBody, content)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages: expected maps with role and content, got {message!r}", param="messages")
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise BadRequest(f"messages: unknown key {key!r}{suggest(str(key), _MESSAGE_KEYS)}", param="messages")
    return dict(message)


def _as_json(value: Any) -> Any:
    """Maps and sequences of other types than JSON's."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__}")
