"""Readers of calls whose arguments are JSON."""

from __future__ import annotations

from fastdeploy_sd.text.tool_calls.call_format import CallFormat, Functions
from fastdeploy_sd.text.tool_calls.json_scan import WHITESPACE, Malformed
from fastdeploy_sd.text.tool_calls.readers import (
    CharReader,
    read_call,
    read_calls,
    read_literal,
    read_object,
    read_one_of,
    read_space,
    read_until,
)
from fastdeploy_sd.text.tool_calls.scanner import Reader, Sink

DEEPSEEK_OPENING = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEPSEEK_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEPSEEK_LAST = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_FENCE = "```"
# What models write after a fence around calls.
FENCE_LANGUAGES = ("", "json", "xml", "tool_call")


def read_hermes(sink: Sink, opening: str, functions: Functions) -> Reader:
    """A call as a JSON object between tags.

    Source: the templates of NousResearch/Hermes-2-Pro-Llama-3-8B, Qwen/Qwen3-0.6B, baidu/ERNIE-4.5-21B-A3B-Thinking.
    """
    yield from read_call(sink, (yield from read_space()))
    yield from read_literal("</tool_call>", (yield from read_space()))


def read_json(sink: Sink, opening: str, functions: Functions) -> Reader:
    """A call as a JSON object and nothing else, or a list of them; Llama writes a ";" between several.

    Source: the template of meta-llama/Llama-3.1-8B-Instruct, and Meta's description of its prompt format.
    """
    first = opening if opening in "{[" else (yield from read_space())
    if first == "[":
        yield from read_calls(sink, first)
        return
    while True:
        yield from read_call(sink, first)
        sink.end()
        if (yield from read_space()) != ";":
            raise Malformed
        sink.head()
        first = yield from read_space()


def read_bare(sink: Sink, opening: str, functions: Functions, tagged: CallFormat | None = None) -> Reader:
    """JSON objects, or a list of them, without marks, in Markdown fences or not, that an answer begins with.

    A fence may also hold calls of `tagged`, a format with marks.

    Source: answers of Qwen2.5-Coder-Instruct, 0.5B and 1.5B.
    """
    is_fenced = opening == _FENCE
    char = (yield from _read_fence()) if is_fenced else opening
    while True:
        if char == "[":
            yield from read_calls(sink, char, is_bare=True)
        elif char == "{" or tagged is None:
            yield from read_call(sink, char, is_bare=True)
        else:
            mark = yield from read_one_of(tagged.openings, char)
            yield from tagged.read(sink, mark, functions)
        sink.end()
        char = yield from read_space()
        if char == _FENCE[0] and is_fenced:
            yield from read_literal(_FENCE, char)
            sink.end()
            is_fenced = False
            char = yield from read_space()
        elif char in ",;":
            char = yield from read_space()
        sink.head()
        if char == _FENCE[0] and not is_fenced:
            yield from read_literal(_FENCE, char)
            is_fenced = True
            char = yield from _read_fence()


def _read_fence() -> CharReader:
    """Read the rest of a line that opens a fence; return the first character of what the fence holds."""
    language = ""
    while (char := (yield)).isalpha() or char == "_":
        language += char
        if not any(known.startswith(language) for known in FENCE_LANGUAGES):
            raise Malformed
    if language not in FENCE_LANGUAGES:
        raise Malformed
    return (yield from read_space()) if char in WHITESPACE else char


def read_deepseek(sink: Sink, opening: str, functions: Functions) -> Reader:
    """Calls between marks: in V3 and R1 the type "function", a name and fenced JSON; since V3.1 a name and JSON.

    Source: the templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
    """
    tag = yield from read_one_of((DEEPSEEK_BEGIN,), (yield from read_space()))
    while tag == DEEPSEEK_BEGIN:
        name, char = yield from read_until(DEEPSEEK_SEPARATOR[0])
        yield from read_literal(DEEPSEEK_SEPARATOR, char)
        is_fenced = name not in functions
        if is_fenced:
            name, _ = yield from read_until("\n")
            yield from read_literal("```json", (yield from read_space()))
        sink.verify_name(name)
        first = yield from read_space()
        yield from read_object(sink, first, name)
        char = yield from read_space()
        if is_fenced:
            yield from read_literal("```", char)
            char = yield from read_space()
        yield from read_literal(DEEPSEEK_END, char)
        sink.end()
        tag = yield from read_one_of((DEEPSEEK_BEGIN, DEEPSEEK_LAST), (yield from read_space()))
        if tag == DEEPSEEK_BEGIN:
            sink.head()


def read_mistral(sink: Sink, opening: str, functions: Functions) -> Reader:
    """A JSON list of calls; newer models write a name, perhaps an id, and JSON, each call after a mark of its own.

    Source: mistralai/mistral-common, the tokenizers v3, v11 and v13.
    """
    first = yield from read_space()
    if first == "[":
        yield from read_calls(sink, first)
        return
    name, char = yield from read_until("[{", first)
    name = name.rstrip()
    sink.verify_name(name)
    if char == "[":
        tag = yield from read_one_of(("[ARGS]", "[CALL_ID]"), char)
        if tag == "[CALL_ID]":
            _, char = yield from read_until("[")
            yield from read_literal("[ARGS]", char)
        char = yield from read_space()
    yield from read_object(sink, char, name)
