"""Renders messages with a checkpoint's chat template; no text in a message can steer the model.

The template always comes from the checkpoint, never from a request. Before rendering, every text of a control token
(`<|im_end|>`) in a message is replaced by a placeholder that cannot be guessed. Afterwards the prompt is cut at the
control tokens that the template wrote; what lies between gets its characters back, and is encoded by a tokenizer
without control tokens, so that no other spelling of one acts either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jinja2

from fastdeploy_sd.errors import BadRequest, CheckpointError, shown, suggest
from fastdeploy_sd.process.files import describe
from fastdeploy_sd.text.added_tokens import Segment, cut, token_pattern
from fastdeploy_sd.text.call_arguments import Unparsed, template_arguments
from fastdeploy_sd.text.template_environment import RefusedError, Sandbox, Shield, rendering_with

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]
# Roles of OpenAI's API. A template may know others, and leave out messages of those that it does not know.
ROLES = ("system", "developer", "user", "assistant", "tool")
# The longest published ones have 30,000. Compiling takes up to 15 microseconds per character.
MAX_CHARS = 1 << 17
# Variables that a template reads but a request does not set this way.
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class PromptEnd(StrEnum):
    """Where the prompt ends: before the assistant's next turn, after the last message, or inside it."""

    TURN = "turn"
    PLAIN = "plain"
    CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation as plain values; `tool_calls` are in OpenAI's form."""

    role: str
    content: str
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Json]] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatTemplate:
    """A compiled chat template; `control_tokens` do not act when they come from a message. Raises CheckpointError."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        if len(source) > MAX_CHARS:
            raise CheckpointError(f"chat template: expected at most {MAX_CHARS} characters, got {len(source)}")
        environment = Sandbox()
        try:
            self._template = environment.compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template: line {error.lineno}: {error.message}") from None
        except Exception as error:  # nested too deeply for the parser or for Python, a number of too many digits, ...
            reason = describe(error) or type(error).__name__
            raise CheckpointError(f"chat template: expected one that can be compiled, got {reason:.200}") from None
        self._reads_thinking = "message.thinking" in source
        self._special_tokens = {"bos_token": "", "eos_token": ""} | dict(special_tokens)
        self._own_variables = _RESERVED | set(environment.globals) | set(self._special_tokens)
        self._control_tokens = tuple(control_tokens)
        self._control = token_pattern(self._control_tokens)
        self._beginnings = frozenset(token[:n] for token in self._control_tokens for n in range(1, len(token)))

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Json],
        max_control_tokens: int | None = None,
        tools: Sequence[Mapping[str, Json]] = (),
        end: PromptEnd = PromptEnd.TURN,
    ) -> tuple[Segment, ...]:
        """Return the prompt of a conversation of at least one message; raises BadRequest.

        Variables in `kwargs` that the template does not read have no effect: clients send some to every model.
        """
        self._verify_kwargs(kwargs)
        shield = Shield(self._control, self._beginnings, max_control_tokens)
        try:
            turns = [_turn(message, shield, reads_thinking=self._reads_thinking) for message in messages]
            extra = {key: shield.cover(value) for key, value in kwargs.items()}
            if end is PromptEnd.CONTINUED:
                turns[-1]["content"] += shield.end_mark + " "
            others = [turn for turn in turns if turn["role"] not in ROLES]
            variables = {**self._special_tokens, **extra, "messages": turns}
            variables["add_generation_prompt"] = end is PromptEnd.TURN
            if tools:
                variables["tools"] = shield.cover(tools)
            with rendering_with(shield):
                text = self._template.render(variables)
                left_out = self._left_out(others, variables, shield)
        except BadRequest:
            raise
        except Exception as error:  # a template can raise anything; it is about these messages
            raise _refusal(error, messages) from None
        if left_out:
            raise _unknown_roles(left_out, "it leaves out their messages")
        if end is PromptEnd.CONTINUED:
            text = _before_mark(text, shield.end_mark)
        return tuple(self._segments(text, shield))

    def _left_out(self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any], shield: Shield) -> list[str]:
        """The roles of those of the turns that a rendering does not write; their contents are changed."""
        for i, turn in enumerate(turns):
            turn["content"] += shield.mark(f"turn{i}")
        text = self._template.render(variables) if turns else ""
        return [turn["role"] for i, turn in enumerate(turns) if shield.mark(f"turn{i}") not in text]

    def _verify_kwargs(self, kwargs: Mapping[str, Json]) -> None:
        for key in kwargs:
            if key in self._own_variables:
                raise BadRequest(
                    f"chat_template_kwargs: expected variables that a request may set, got {key!r}",
                    param="chat_template_kwargs",
                )

    def _segments(self, text: str, shield: Shield) -> Iterable[Segment]:
        for part, is_control in cut(self._control, text):
            yield Segment(part if is_control else shield.uncover(part), is_control)


def _before_mark(text: str, mark: str) -> str:
    """Return what a template wrote before the mark, trimmed where it trims messages and so loses the blank after it."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise BadRequest(
            "continue_final_message: expected a chat template that writes the last message, got one that leaves it out",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _turn(message: Message, shield: Shield, *, reads_thinking: bool) -> dict[str, Any]:
    """A message as templates read it: a key that is not set is missing, arguments are an object if they can be.

    gpt-oss's reads what was thought as `thinking`, and refuses content next to it before a call: it takes both for it.
    """
    content, thinking = message.content, message.reasoning_content if reads_thinking else None
    if thinking and content and message.tool_calls:
        content, thinking = "", f"{thinking}\n{content}"
    optional = {
        "thinking": thinking or None,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [_tool_call(call) for call in message.tool_calls] or None,
    }
    turn = {"role": shield.cover(message.role), "content": shield.cover(content)}
    return turn | {key: shield.cover(value) for key, value in optional.items() if value is not None}


def _tool_call(call: Mapping[str, Json]) -> Mapping[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str | Mapping):
        return call
    return {**call, "function": {**function, "arguments": template_arguments(arguments)}}


def _refusal(error: Exception, messages: Sequence[Message]) -> BadRequest:
    """Return what is wrong with messages that made a template raise."""
    for call in (_tool_call(call) for message in messages for call in message.tool_calls):
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, Unparsed):
            text = (
                "messages: expected arguments of a tool call that are a JSON object, as the model's chat template reads"
                f" them as one, got {shown(str(arguments))}"
            )
            return BadRequest(text, param="messages")
    reason = describe(error) or type(error).__name__
    others = [message.role for message in messages if message.role not in ROLES]
    if others:
        return _unknown_roles(others, reason)
    text = str(error) if isinstance(error, RefusedError) else f"the chat template cannot render them: {reason}"
    return BadRequest(f"messages: {text}", param="messages")


def _unknown_roles(roles: Iterable[str], reason: str) -> BadRequest:
    names = [shown(role) + suggest(role, ROLES) for role in dict.fromkeys(roles)]
    text = f"messages: expected roles that the model's chat template knows, got {', '.join(names[:8])}: {reason}"
    return BadRequest(text, param="messages")
