"""Grammars of calls, in the format that the model's parser reads, so that a guided call always parses.

Calls that are wanted begin the answer. One that the model may make or not is guided from its opening on, up to the text
that the format puts after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastdeploy_sd.text.tool_calls.call_format import BARE_OPENINGS, CallFormat
from fastdeploy_sd.text.tool_calls.json_calls import FENCE_LANGUAGES
from fastdeploy_sd.text.tool_calls.parameter_grammars import ANY_TEXT, GrammarRules, parameters_rule
from fastdeploy_sd.text.tool_calls.tools import ToolMode, ToolUse

# Wanted calls of one answer: a model that finds no end must come to one.
MAX_GUIDED_CALLS = 16
_SPACE = r"[ \t\r\n]"
# What a call without marks begins with, up to its name.
_BARE_START = (
    rf"(```({'|'.join(FENCE_LANGUAGES)}){_SPACE}*)?(\[{_SPACE}*)?"
    rf'\{{{_SPACE}*(\{{{_SPACE}*)?"name"{_SPACE}*:{_SPACE}*"'
)


def is_guided(use: ToolUse) -> bool:
    """Return whether an answer must follow a grammar: calls are wanted, one is strict, or one is the most."""
    is_strict = any(tool.strict for tool in use.callable_tools)
    return use.mode is not ToolMode.NONE and (use.mode is ToolMode.REQUIRED or use.takes_one_call or is_strict)


def ends_after_calls(form: CallFormat, use: ToolUse) -> bool:
    """Return whether wanted calls end where the model, left free after one, does not begin another.

    A model that could only go on with a call or end would call more than it wants.
    """
    return use.mode is ToolMode.REQUIRED and not use.takes_one_call and form.has_separate_calls


def tool_grammar(
    form: CallFormat,
    use: ToolUse,
    hidden_ids: Mapping[str, int],
    content: str = "",
    *,
    reads_bare: bool = False,
) -> str:
    """Return the grammar of a guided answer; raises BadRequest where the format cannot write a parameter.

    `content` is the grammar of an answer that calls nothing; `hidden_ids` are of tokens that text does not show.
    """
    is_wanted = use.mode is ToolMode.REQUIRED
    writer = _Writer(form, use, hidden_ids, is_wanted=is_wanted)
    if is_wanted:
        return writer.wanted()
    if content:
        return writer.or_content(content)
    return writer.possible_or_bare() if reads_bare or form.openings == BARE_OPENINGS else writer.possible()


class _Writer:
    """The rules of one grammar."""

    def __init__(self, form: CallFormat, use: ToolUse, hidden_ids: Mapping[str, int], *, is_wanted: bool) -> None:
        self._form, self._use, self._text = form, use, form.text
        self._rules = GrammarRules(hidden_ids)
        self._parameters = {
            tool.name: parameters_rule(self._rules, form, tool, has_schema=is_wanted or tool.strict)
            for tool in use.callable_tools
        }
        bodies = []
        for name, parameters in self._parameters.items():
            beginning = self._rules.literal(name + self._text.before_arguments)
            bodies.append(f"{beginning} {parameters} {self._rules.literal(self._text.after)}")
        self._call = self._rules.add(" | ".join(bodies))  # from the name on

    def wanted(self) -> str:
        """The grammar of calls and nothing else; see ends_after_calls."""
        beginning = self._text.before_all + self._text.before_name
        if ends_after_calls(self._form, self._use):
            opening, text = self._opening(beginning), self._rules.add_terminal(ANY_TEXT)
            again = self._rules.add(f"{self._head(opening, text)} {self._calls(beginning.removeprefix(opening), 0)}")
            more = f"{again}{{0,{MAX_GUIDED_CALLS - 1}}} {text}"
            return self._rules.text(f"{self._calls(beginning, 0)} {more}")
        return self._rules.text(self._calls(beginning, MAX_GUIDED_CALLS - 1))

    def or_content(self, content: str) -> str:
        """The grammar of calls and nothing else, or of an answer with a grammar of its own."""
        beginning = self._text.before_all + self._text.before_name
        answer = self._rules.add(f"%lark {{\n{content}\n}}")
        return self._rules.text(f"{self._calls(beginning, MAX_GUIDED_CALLS - 1)} | {answer}")

    def possible(self) -> str:
        """The grammar of text in which each call is guided."""
        if self._form.only_first:
            beginning = self._text.before_all + self._text.before_name
            return self._rules.text(f"{self._calls(beginning, None)} | {self._rules.add(self._other_text())}")
        return self._rules.text(self._marked_calls(self._any_text()))

    def possible_or_bare(self) -> str:
        """The grammar of text in which each call is guided, with the marks of the format or, in front, without any."""
        start = rf"{_SPACE}*(```{_SPACE}*)?[,;]?{_SPACE}*{_BARE_START}({'|'.join(self._parameters)})\""
        free = f"({self._any_text()} & ~/{start}(.|\\n)*/)"
        bare = self._bare_calls()
        if self._form.only_first:
            return self._rules.text(f"{bare} | {self._rules.add_terminal(free)}")
        return self._rules.text(f"{bare} | {self._marked_calls(free)}")

    def _bare_calls(self) -> str:
        """Calls without marks. What stands between two objects is one terminal, as the lexer does not go back."""
        rules, close = self._rules, rf"{_SPACE}*\}}({_SPACE}*\}})?({_SPACE}*\])?({_SPACE}*```)?{_SPACE}*"
        space = rules.add_terminal(f"/{_SPACE}+/")
        start = rules.add_terminal(f"/{_SPACE}*{_BARE_START}/")
        next_start = rules.add_terminal(f"/{close}[,;]?{_SPACE}*{_BARE_START}/")
        after_name = rules.add_terminal(rf'/"{_SPACE}*,{_SPACE}*"(arguments|parameters)"{_SPACE}*:/')
        firsts, others = [], []
        for name, parameters in self._parameters.items():
            first = rules.add(f"{start} {rules.quoted(name)} {after_name}", "[lazy]")
            other = rules.add_terminal(f"{next_start} {rules.quoted(name)} {after_name}")
            firsts.append(f"{first} {space}? {parameters}")
            others.append(f"{other} {space}? {parameters}")
        more = "" if self._use.takes_one_call else f"{rules.add(' | '.join(others))}*"
        return f"{rules.add(' | '.join(firsts))} {more} {rules.add_terminal(f'/{close}/')}"

    def _marked_calls(self, free: str) -> str:
        """Text in which each call with the marks of the format is guided; `free` = what stands between them."""
        beginning = self._text.before_all + self._text.before_name
        opening = self._opening(beginning)
        text = self._free_text(self._rules.add_terminal(free), opening)
        head = self._head(opening, text)
        is_section = bool(self._text.before_all)
        calls = self._calls(beginning.removeprefix(opening), None if is_section else 0)
        if self._form.other_messages:
            others = self._rules.add(" | ".join(map(self._rules.literal, self._form.other_messages)))
            if self._use.takes_one_call:
                return f"({head} {others})* ({head} {calls} | {text})"
            calls = f"({calls} | {others})"
        if self._use.takes_one_call:
            return f"{head} {calls} | {text}"
        return f"({head} {calls})* {text}"

    def _any_text(self) -> str:
        excluded = re.escape(self._form.excluded_text)
        return f"({ANY_TEXT} & ~/(.|\\n)*{excluded}(.|\\n)*/)" if excluded else ANY_TEXT

    def _free_text(self, terminal: str, opening: str) -> str:
        """Text without an opening, in which the other marks of the format may stand."""
        hidden = [mark for mark in self._form.markers if mark != opening and self._rules.id_of(mark) is not None]
        if not self._form.other_messages or not hidden:
            return terminal
        marks = self._rules.add(" | ".join(map(self._rules.literal, hidden)))
        return self._rules.add(f"({terminal} {marks})* {terminal}")

    def _calls(self, beginning: str, num_more: int | None) -> str:
        """A call after this text and at most so many more; None = any number."""
        more = ""
        if not self._use.takes_one_call and num_more != 0:
            again = self._rules.add(f"{self._rules.literal(self._text.between + self._text.before_name)} {self._call}")
            more = f"{again}*" if num_more is None else f"{again}{{0,{num_more}}}"
        return f"{self._rules.literal(beginning)} {self._call} {more} {self._rules.literal(self._text.after_all)}"

    def _opening(self, beginning: str) -> str:
        return next(opening for opening in self._form.openings if beginning.startswith(opening))

    def _head(self, opening: str, text: str) -> str:
        """Free text up to an opening, and the opening."""
        if self._rules.id_of(opening) is not None:
            return f"{text} {self._rules.literal(opening)}"
        return self._rules.add(f"{text} {self._rules.literal(opening)}", "[lazy]")

    def _other_text(self) -> str:
        """Text that begins no call."""
        firsts = "".join("\\" + opening for opening in self._form.openings if len(opening) == 1)
        return rf"/{_SPACE}*([^ \t\r\n{firsts}](.|\n)*)?/"
