"""The options that a tool call parser needs, in a form that can be sent between processes."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.text.answer_parts import ToolParser
from fastdeploy_sd.text.tool_calls.call_format import CallableFunction
from fastdeploy_sd.text.tool_calls.formats import FORMATS
from fastdeploy_sd.text.tool_calls.json_calls import read_bare


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The functions that an answer may call.

    Attributes:
        format: name of the model's format.
        reads_bare: calls without the format's marks are read, too, where an answer begins with them.
        ends_after_calls: text after a call that begins no other call ends the answer.
        is_legacy: the answer says `function_call`, OpenAI's older name of its only call.
    """

    format: str
    functions: tuple[CallableFunction, ...]
    reads_bare: bool = False
    is_legacy: bool = False
    ends_after_calls: bool = False

    def parser(self) -> ToolParser:
        """Return what finds calls in one answer."""
        form = FORMATS[self.format]
        if not self.reads_bare:
            return form.parser(self.functions, ends_after_calls=self.ends_after_calls)
        tagged = None if form.only_first else form
        return form.parser(self.functions, lambda sink, opening, named: read_bare(sink, opening, named, tagged))
