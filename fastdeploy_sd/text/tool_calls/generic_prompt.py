"""Describes tools in words, for models whose chat template has no place for tools.

The words describe the format GENERIC, in which earlier calls and their results are then written too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.tool_calls.formats import FORMATS, GENERIC

_OFFER = """You can call functions. This is how to call one:
{example}
Several calls stand one below the other. These are the functions, with JSON schemas of their arguments:
{functions}"""


def with_offer(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the turns with the functions in the system's, which is the first.

    Args:
        tools: in OpenAI's form.
    """
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = _OFFER.format(example=_written({"name": "NAME", "arguments": {}}), functions="\n".join(lines))
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n\n{text}".strip()), *messages[1:]]
    return [Message("system", text), *messages]


def with_written_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the turns with calls as a part of their text, and with the results of calls in turns of the user."""
    return [_written_turn(message) for message in messages]


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
