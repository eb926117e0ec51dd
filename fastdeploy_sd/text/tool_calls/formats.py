"""The tool call formats by name, and which one a chat template uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.text.tool_calls.call_format import (
    BARE_OPENINGS,
    CallableFunction,
    CallFormat,
    CallText,
    ParameterText,
)
from fastdeploy_sd.text.tool_calls.channel_calls import HARMONY
from fastdeploy_sd.text.tool_calls.json_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_LAST,
    DEEPSEEK_OPENING,
    DEEPSEEK_SEPARATOR,
    read_bare,
    read_deepseek,
    read_hermes,
    read_json,
    read_mistral,
)
from fastdeploy_sd.text.tool_calls.scanner import Scanner
from fastdeploy_sd.text.tool_calls.tagged_calls import read_glm, read_qwen3_coder

_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK_MARKERS = (DEEPSEEK_OPENING, DEEPSEEK_BEGIN, DEEPSEEK_SEPARATOR, DEEPSEEK_END, DEEPSEEK_LAST)

# A template is searched for their signs in this order.
FORMATS: Mapping[str, CallFormat] = {
    "glm45": CallFormat(
        models="GLM-4.5 and later",
        openings=_TOOL_CALL[:1],
        read=read_glm,
        text=CallText(
            before_name="<tool_call>",
            before_arguments="\n",
            after="</tool_call>",
            parameters=ParameterText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        markers=(*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=(("<arg_key>", "<arg_value>"),),
    ),
    "qwen3_coder": CallFormat(
        models="Qwen3-Coder",
        openings=("<tool_call>", "<function="),
        read=read_qwen3_coder,
        text=CallText(
            before_name="<tool_call>\n<function=",
            before_arguments=">\n",
            after="</function>\n</tool_call>",
            parameters=ParameterText("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        markers=_TOOL_CALL,
        signs=(("<function=", "<parameter="),),
    ),
    "deepseek_v3": CallFormat(
        models="DeepSeek V3 and R1",
        openings=(DEEPSEEK_OPENING,),
        read=read_deepseek,
        text=CallText(
            before_name=DEEPSEEK_BEGIN + "function" + DEEPSEEK_SEPARATOR,
            before_arguments="\n```json\n",
            after="\n```" + DEEPSEEK_END,
            before_all=DEEPSEEK_OPENING,
            after_all=DEEPSEEK_LAST,
        ),
        markers=_DEEPSEEK_MARKERS,
        signs=((DEEPSEEK_BEGIN, "```json"),),
    ),
    "deepseek_v31": CallFormat(
        models="DeepSeek V3.1",
        openings=(DEEPSEEK_OPENING,),
        read=read_deepseek,
        text=CallText(
            before_name=DEEPSEEK_BEGIN,
            before_arguments=DEEPSEEK_SEPARATOR,
            after=DEEPSEEK_END,
            between="",
            before_all=DEEPSEEK_OPENING,
            after_all=DEEPSEEK_LAST,
        ),
        markers=_DEEPSEEK_MARKERS,
        signs=((DEEPSEEK_BEGIN,),),
    ),
    "harmony": HARMONY,
    "mistral": CallFormat(
        models="Mistral",
        openings=("[TOOL_CALLS]",),
        read=read_mistral,
        text=CallText(between=", ", before_all="[TOOL_CALLS][", after_all="]"),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        signs=(("[TOOL_CALLS]",),),
    ),
    "hermes": CallFormat(
        models="Qwen2.5, Qwen3, Hermes, ERNIE with thinking; any model whose template knows no tools",
        openings=_TOOL_CALL[:1],
        read=read_hermes,
        text=CallText(before_name='<tool_call>\n{"name": "', after="}\n</tool_call>"),
        markers=_TOOL_CALL,
        signs=(("<tool_call>",),),
    ),
    "llama3_json": CallFormat(
        models="Llama 3.1 and later",
        openings=("<|python_tag|>", "{"),
        read=read_json,
        text=CallText(before_arguments='", "parameters": ', between="; "),
        only_first=True,
        markers=("<|python_tag|>",),
        signs=(("<|python_tag|>",), ('"parameters": ', "<|start_header_id|>")),
    ),
    "json": CallFormat(
        models="models that write JSON, bare or in a Markdown fence",
        openings=BARE_OPENINGS,
        read=read_bare,
        text=CallText(between=", ", before_all="[", after_all="]"),
        only_first=True,
    ),
}
# What a model is asked to write that has learnt no format of its own.
GENERIC = "hermes"
# Names that other servers have for these formats.
ALIASES: Mapping[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "ernie": "hermes",
    "ernie_x1": "hermes",
    "ernie_45_vl_thinking": "hermes",
    "ernie45": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "openai": "harmony",
    "gpt_oss": "harmony",
}


def find_format(name: str | None, chat_template: str | None) -> str | None:
    """Return the format that `--tool-call-parser` names, None = calls are not read; raises ConfigError.

    A name may be another server's; "auto" is the format that the chat template speaks, or GENERIC.
    """
    if name is None:
        return None
    if name == "auto":
        return _detected(chat_template or "")
    found = ALIASES.get(name.replace("-", "_").lower(), name.replace("-", "_").lower())
    if found not in FORMATS:
        names = ("auto", "none", *FORMATS)
        raise ConfigError(
            f"tool_call_parser: expected one of {', '.join(names)}, got {name!r}{suggest(name, names)}",
            param="tool_call_parser",
        )
    return found


def _detected(chat_template: str) -> str:
    for name, form in FORMATS.items():
        if any(all(sign in chat_template for sign in group) for group in form.signs):
            return name
    return GENERIC


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The functions that an answer may call; `is_legacy` says `function_call`, OpenAI's older name of its only call."""

    format: str
    functions: tuple[CallableFunction, ...]
    reads_bare: bool = False
    is_legacy: bool = False
    ends_after_calls: bool = False

    def parser(self) -> Scanner:
        """Return what finds calls in one answer."""
        form = FORMATS[self.format]
        if not self.reads_bare:
            return form.parser(self.functions, ends_after_calls=self.ends_after_calls)
        tagged = None if form.only_first else form
        return form.parser(self.functions, lambda sink, opening, named: read_bare(sink, opening, named, tagged))
