"""Messages -> the prompt text of a checkpoint's chat template, with nothing in a message able to steer the model.

Owns the sandbox the template runs in and the shielding of control tokens. The template always comes from the
checkpoint, never from a request. Knows no token ids.

A message may contain the text of a control token (`<|im_end|>`), by accident or to forge a turn. Before rendering every
such occurrence is replaced by a placeholder nobody can guess, so that the template's own string operations (trim,
split) see the message as usual. Afterwards the prompt is cut at the control tokens that are left, which the template
wrote; what lies between gets the original characters back and is encoded by a tokenizer that has no control tokens, so
that no other spelling of one (full-width, in capitals) acts either.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from fastdeploy_sd.entrypoints.text.added_tokens import Segment, cut, token_pattern
from fastdeploy_sd.errors import BadRequest, CheckpointError
from fastdeploy_sd.files import describe
from fastdeploy_sd.request_rules import prompt_too_long

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]
# The longest published ones have 30,000. Compiling takes up to 15 microseconds per character.
MAX_CHARS = 1 << 17
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
# Variables that a template reads but a request does not set this way.
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, as plain values.

    Attributes:
        content: "" in a turn that has none.
        tool_calls: of an assistant's turn, in OpenAI's form: {"id", "type", "function": {"name", "arguments"}}.
        tool_call_id: of a tool's turn, the call it answers.
        reasoning_content: what an assistant thought before `content`.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Json]] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text of the checkpoint.
        special_tokens: "bos_token" and so on -> text, given to the template as variables.
        control_tokens: texts that must not act when they come from a message.

    Raises:
        CheckpointError: the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        if len(source) > MAX_CHARS:
            raise CheckpointError(f"chat template: expected at most {MAX_CHARS} characters, got {len(source)}")
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template: line {error.lineno}: {error.message}") from None
        except Exception as error:  # nested too deeply for the parser or for Python, a number of too many digits, ...
            reason = describe(error) or type(error).__name__
            raise CheckpointError(f"chat template: expected one that can be compiled, got {reason:.200}") from None
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
    ) -> tuple[Segment, ...]:
        """Return the prompt that asks for the assistant's next turn.

        Args:
            messages: in order, at least one.
            kwargs: extra template variables (chat_template_kwargs). One that the template does not read has no
                effect: clients send `enable_thinking` and the like to every model.
            max_control_tokens: how many may be written in the messages, each of which has to be shielded; None = any
                number.
            tools: functions that the model may call, in OpenAI's form; () = the template has no such variable.

        Raises:
            BadRequest: the template refuses the messages, they have too many control tokens, or kwargs name a variable
                that is not theirs to set.
        """
        self._verify_kwargs(kwargs)
        shield = _Shield(self._control, self._beginnings, max_control_tokens)
        try:
            turns = [_turn(message, shield) for message in messages]
            extra = {key: shield.cover(value) for key, value in kwargs.items()}
            variables = {**self._special_tokens, **extra, "messages": turns, "add_generation_prompt": True}
            if tools:
                variables["tools"] = shield.cover(tools)
            text = self._template.render(variables)
        except BadRequest:
            raise
        except Exception as error:  # a template can raise anything; it is about these messages
            reason = describe(error) or type(error).__name__
            raise BadRequest(f"messages: the chat template cannot render them: {reason}", param="messages") from None
        return tuple(self._segments(text, shield))

    def _verify_kwargs(self, kwargs: Mapping[str, Json]) -> None:
        for key in kwargs:
            if key in self._own_variables:
                raise BadRequest(
                    f"chat_template_kwargs: expected variables that a request may set, got {key!r}",
                    param="chat_template_kwargs",
                )

    def _segments(self, text: str, shield: _Shield) -> Iterable[Segment]:
        for part, is_control in cut(self._control, text):
            yield Segment(part if is_control else shield.uncover(part), is_control)


def reads_tools(source: str) -> bool:
    """Return whether a valid template has a place for functions that the model may call."""
    return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(source))


class _Shield:
    """The placeholders of one rendering."""

    def __init__(self, control: re.Pattern[str], beginnings: Collection[str], limit: int | None) -> None:
        self._control = control
        self._beginnings = beginnings
        self._limit = limit
        self._longest = max(map(len, beginnings), default=0)
        # Digits survive `upper`, `lower` and `tojson`. The borders, two random private-use characters, show a cut.
        self._nonce = str(secrets.randbits(128))
        self._open, self._close = map(chr, secrets.SystemRandom().sample(_PRIVATE_USE, 2))
        self._originals: list[str] = []
        self._placeholder = re.compile(f"{self._open}{self._nonce}:([0-9]+){self._close}")

    def cover(self, value: Any) -> Any:
        """Return a JSON value with each control token in each of its texts replaced by a placeholder.

        The beginning of a token at the end of a text is replaced too, as the next text could be its rest.
        """
        if isinstance(value, str):
            return self._cover_end(self._control.sub(self._cover_match, value))
        if isinstance(value, Mapping):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """Put the originals back.

        Raises:
            BadRequest: the template cut a placeholder in two.
        """
        restored = self._placeholder.sub(lambda m: self._originals[int(m[1])], text)
        if self._originals and any(part in restored for part in (self._open, self._close, self._nonce)):
            raise BadRequest("messages: the chat template cuts a message inside a control token", param="messages")
        return restored

    def _cover_end(self, text: str) -> str:
        words = text.rstrip()  # a template may trim it
        for n in range(min(self._longest, len(words)), 0, -1):
            if words[-n:] in self._beginnings:
                return words[:-n] + self._placeholder_of(words[-n:]) + text[len(words) :]
        return text

    def _cover_match(self, match: re.Match[str]) -> str:
        if self._limit is not None and len(self._originals) >= self._limit:
            raise prompt_too_long(self._limit + 1, "more than that of control tokens in messages", param="messages")
        return self._placeholder_of(match[0])

    def _placeholder_of(self, original: str) -> str:
        self._originals.append(original)
        return f"{self._open}{self._nonce}:{len(self._originals) - 1}{self._close}"


def _turn(message: Message, shield: _Shield) -> dict[str, Any]:
    """A message as templates read it: a key that is not set is missing, a call's arguments are an object."""
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [_tool_call(call) for call in message.tool_calls] or None,
    }
    turn = {"role": message.role, "content": shield.cover(message.content)}
    return turn | {key: shield.cover(value) for key, value in optional.items() if value is not None}


def _tool_call(call: Mapping[str, Json]) -> Mapping[str, Json]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(str(function["arguments"]) or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"messages: expected arguments of a tool call that are JSON, got {function['arguments']!r:.100} ({error})",
            param="messages",
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


# ---- what templates of published checkpoints expect -----------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The sandbox. Compiling computes nothing: `{{ 'a' * 10**10 }}` is computed by rendering, which has limits."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
        optimized=False,
        finalize=_finalize,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    """Prevent constant folding: the compiler does not run in advance what takes the context."""
    return value


def _raise_exception(message: str) -> NoReturn:
    raise BadRequest(f"messages: {message}", param="messages")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON as it is, without HTML escaping."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
