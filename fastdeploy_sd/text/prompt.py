"""Raw prompts and conversations -> prompt token ids, for one checkpoint. Knows no request and no sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.requests import prompt_too_long
from fastdeploy_sd.text.chat_template import ChatTemplate, Json, Message, PromptEnd
from fastdeploy_sd.text.infill import files_before, find_marks, infill_ends
from fastdeploy_sd.text.template_environment import reads_tools
from fastdeploy_sd.text.template_process import TemplateProcess
from fastdeploy_sd.text.tokenizer import Tokenizer, output_encoder
from fastdeploy_sd.text.tool_calls.formats import FORMATS, GENERIC

# OpenAI renamed the role; chat templates know the older name.
_TEMPLATE_ROLES = {"developer": "system"}


class PromptEncoder:
    """Encodes prompts with a checkpoint's tokenizer and chat template; raises CheckpointError of a wrong template.

    `infill`: marks for filling in the middle, None = the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer, *, isolates_template: bool = False) -> None:
        """Encode with `tokenizer`; with `isolates_template` the template runs in a process of its own, under limits."""
        self.tokenizer = tokenizer
        self._encode_output = output_encoder(tokenizer)
        self.infill = find_marks(tokenizer.control_tokens)
        self._template: ChatTemplate | TemplateProcess | None = None
        source = tokenizer.files.chat_template
        if source is not None:
            kind = TemplateProcess if isolates_template else ChatTemplate
            self._template = kind(source, tokenizer.files.special_tokens, tokenizer.control_tokens)
            self._knows_tools, self._knows_calls = reads_tools(source), "tool_calls" in source
            self._reads_one_call = "tool_calls[0]" in source
            self._joins_descriptions = "+ tool.description" in source
            tokenizer.encode_segments([])  # what the first conversation would have to build, forked processes share

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template, without which no conversation can be encoded."""
        return self._template is not None

    def encode_text(self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt: control tokens written in it act, and a BOS is added if the model has one.

        A text that must have more than `max_tokens` is refused with BadRequest before it is encoded.
        """
        self._verify_may_fit([text], max_tokens)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_infill(
        self,
        before: str,
        after: str,
        max_tokens: int | None = None,
        files: Sequence[tuple[str, str]] = (),
        begun: str = "",
    ) -> list[int]:
        """Return the ids of a prompt for what belongs between two texts; control tokens in them are plain text.

        files: names and texts of what the model shall know besides. begun: what belongs there so far.

        Raises BadRequest: the tokenizer has no marks for it, or a text is too long.
        """
        if self.infill is None:
            text = "suffix: not supported: the model's tokenizer has no marks for filling in the middle"
            raise BadRequest(text, param="suffix", code="not_supported")
        self._verify_may_fit([before, after, begun, *chain.from_iterable(files)], max_tokens)
        segments = files_before(files, self.tokenizer.control_tokens) + self.infill.prompt(before, after, begun)
        return self.tokenizer.encode("", add_special_tokens=True) + self.tokenizer.encode_segments(segments)

    @property
    def infill_end_ids(self) -> tuple[int, ...]:
        """Ids that end what fills a gap."""
        return () if self.infill is None else infill_ends(self.infill, self.tokenizer.control_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Json],
        max_tokens: int | None = None,
        tools: Sequence[Mapping[str, Json]] = (),
        end: PromptEnd = PromptEnd.TURN,
    ) -> list[int]:
        """Return the ids of a conversation; control tokens in messages are plain text. Raises BadRequest.

        A template without a place for tools, and for earlier calls, gets them as words.
        """
        if not messages:
            raise BadRequest("messages: expected at least one message, got none", param="messages")
        if self._template is None:
            raise BadRequest(
                "messages: expected a model with a chat template, got one without (use /v1/completions)",
                param="messages",
            )
        turns = [replace(m, role=_TEMPLATE_ROLES.get(m.role, m.role)) for m in messages]
        if not self._knows_calls:
            turns = with_written_calls(turns)
        elif self._reads_one_call:
            turns = with_single_calls(turns)
        if tools and not self._knows_tools:
            turns, tools = with_offer(turns, tools), ()
        if self._joins_descriptions:
            tools = [_described(tool) for tool in tools]
        segments = self._template.render(turns, kwargs, max_tokens, tools, end)
        self._verify_may_fit([segment.text for segment in segments], max_tokens)
        return self.tokenizer.encode_segments(segments)

    def encode_prediction(self, text: str, max_tokens: int) -> list[int]:
        """Return the ids of what an output is expected to be, hidden tokens as plain text; raises BadRequest."""
        if (num_tokens := self._least_tokens([text])) > max_tokens:
            text = f"prediction: expected at most {max_tokens} tokens, got at least {num_tokens}"
            raise BadRequest(text, param="prediction", code="context_length_exceeded")
        return self._encode_output(text)

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences a forbidden text has: at the start of a line and after a space."""
        forms = (word, " " + word.lstrip(" "))
        spelled = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return list(dict.fromkeys(filter(None, spelled)))

    def _verify_may_fit(self, texts: Sequence[str], max_tokens: int | None) -> None:
        num_tokens = self._least_tokens(texts)
        if max_tokens is not None and num_tokens > max_tokens:
            raise prompt_too_long(max_tokens + 1, f"at least {num_tokens}")

    def _least_tokens(self, texts: Sequence[str]) -> int:
        """How many tokens texts have if each is the longest of the vocabulary; 0 where the longest is not known."""
        longest = self.tokenizer.max_token_chars
        return 0 if longest is None else sum(-(-len(text) // longest) for text in texts)


_OFFER = """You can call functions. This is how to call one:
{example}
Several calls stand one below the other. These are the functions, with JSON schemas of their arguments:
{functions}"""


def with_offer(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the turns with the functions, in OpenAI's form, in the system's, which is the first."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = _OFFER.format(example=_written({"name": "NAME", "arguments": {}}), functions="\n".join(lines))
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n\n{text}".strip()), *messages[1:]]
    return [Message("system", text), *messages]


def with_written_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the turns with calls as a part of their text, and with the results of calls in turns of the user."""
    return [_written_turn(message) for message in messages]


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function with a description, be it empty: a template that joins it with text fails without one."""
    function = tool["function"]
    return {**tool, "function": {**function, "description": function.get("description", "")}}


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the turns with one call in each, and its result after it, for templates that read no further call."""
    turns: list[Message] = []
    results: list[Message] = []  # that follow a turn with several calls
    calling: Message | None = None
    for message in [*messages, None]:
        if message is not None and message.role == "tool" and calling is not None:
            results.append(message)
            continue
        if calling is not None:
            turns += _one_by_one(calling, results)
            calling = None
        if message is not None and len(message.tool_calls) > 1:
            calling, results = message, []
        elif message is not None:
            turns.append(message)
    return turns


def _one_by_one(message: Message, results: Sequence[Message]) -> list[Message]:
    """A turn with several calls as turns with one, each with its results; those of no call stand at the end."""
    turns: list[Message] = []
    first, *others = message.tool_calls
    bare = replace(message, content="", reasoning_content=None)
    for turn in (replace(message, tool_calls=(first,)), *(replace(bare, tool_calls=(call,)) for call in others)):
        turns += [turn, *(result for result in results if result.tool_call_id == turn.tool_calls[0].get("id"))]
    known = {call.get("id") for call in message.tool_calls}
    return turns + [result for result in results if result.tool_call_id not in known]


def _written_turn(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [_written(call.get("function")) for call in message.tool_calls]
    return replace(message, content="\n".join((*filter(None, [message.content]), *calls)), tool_calls=())


def _written(function: Any) -> str:
    """A call in the format GENERIC; arguments come as JSON text or as an object."""
    text = FORMATS[GENERIC].text
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{text.before_name}{function['name']}{text.before_arguments}{arguments or '{}'}{text.after}"
