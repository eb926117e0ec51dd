"""Grammars for reasoning models: the answer's grammar begins after the reasoning, whose length may be limited.

Where the vocabulary hides the closing mark, only its token ends the thinking; else its text does, however it is
spelled in tokens. A limit counts tokens, so it takes marks that are one token each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.channels import ASSISTANT, CHANNEL
from fastdeploy_sd.text.reasoning_formats import ReasoningFormat, Start
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.text.tool_calls.parameter_grammars import GrammarRules

_LIMIT = "reasoning_max_tokens"
# Blanks that a model may set around its marks; without a bound it could go on with them for ever.
_BLANKS = "BLANKS: /[ \\t\\r\\n]{0,8}/"


class ThinkingGrammar:
    """Puts the thinking in front of grammars; `eos_token_ids` end a request, and therefore no thinking."""

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._form = form
        self._opening, self._closing = (_single_token(tokenizer, mark) for mark in (form.opening, form.closing))
        self._channel = _single_token(tokenizer, CHANNEL)
        self._hidden_ids = tokenizer.hidden_ids
        self._hidden_marks = {text: i for text, i in tokenizer.control_tokens.items() if i in tokenizer.hidden_ids}
        self._ends = tuple(eos_token_ids)

    def wrap(self, grammar: str, start: Start, max_tokens: int | None = None) -> str:
        """Return the grammar of an answer with its thinking, of `max_tokens` at most without its marks.

        `grammar` is of what follows, "" = anything. Raises BadRequest of a limit where the marks are no single tokens.
        """
        first = self._channel if self._form.has_channels else self._opening
        if max_tokens is not None and (first is None or self._closing is None):
            raise no_limit(f"this model has no single tokens for {self._form.opening} and {self._form.closing}")
        if start is Start.ANSWER or (not grammar and max_tokens is None):
            return grammar
        if self._form.has_channels:
            return self._wrap_channels(grammar, start, max_tokens)
        thought, rules = self._thought(max_tokens)
        opening = self._mark(self._form.opening, self._opening)
        if not grammar:
            front = thought if start is Start.INSIDE else f"{self._any_but(self._opening)}* ({opening} {thought}"
            end = "" if start is Start.INSIDE else ")?"
            return "\n".join([f"start: {front} {self._any_but()}*{end}", *rules])
        front = f"{thought} BLANKS" if start is Start.INSIDE else f"(BLANKS {opening} {thought} BLANKS)?"
        whole = "\n".join([f"start: {front} @answer", *rules, _BLANKS])
        grammars = [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": grammar}]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def headed(self, grammar: str, start: Start) -> str:
        """Return the grammar of an answer, given that of its text: with its own header where it needs one."""
        if not (grammar and self._form.has_channels) or start is Start.ANSWER:
            return grammar
        return f"start: {self._literal(self._form.answer_alone)} text\ntext: %lark {{\n{grammar}\n}}"

    def _wrap_channels(self, grammar: str, start: Start, max_tokens: int | None) -> str:
        """See wrap. A limit holds for the first thought, and there is no other one."""
        thought, rules = self._thought(max_tokens)
        if start is not Start.INSIDE:
            thought = f"{self._literal(self._form.opening)} {thought}"
        if not grammar:
            optional = "" if start is Start.INSIDE else "?"
            other = f'{self._any_but(self._channel)}* {self._literal(CHANNEL)} ("final" | "commentary")'
            return "\n".join([f"start: ({thought}){optional} ({other})* {self._any_but(self._channel)}*", *rules])
        front = f"{thought} {self._literal(ASSISTANT)}"
        whole = "\n".join([f"start: {front if start is Start.INSIDE else f'({front})?'} @answer", *rules])
        grammars = [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": grammar}]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _literal(self, text: str) -> str:
        return GrammarRules(self._hidden_marks).literal(text)

    def _thought(self, max_tokens: int | None) -> tuple[str, list[str]]:
        """What comes after the opening mark, up to the end of the closing one, and the rules that it names."""
        closing = re.escape(self._form.closing).replace("/", "\\/")
        if max_tokens is not None:
            tokens = f"{self._any_but(self._closing)}{{0,{max_tokens}}} " if max_tokens else ""
            return f"{tokens}{self._mark(self._form.closing, self._closing)}", []
        if self._closing in self._hidden_ids:
            other = f"/(?s:.*)/ & ~/(?s:.*){closing}(?s:.*)/"  # spelled out the mark would end it for the splitter
            return f"THOUGHT <[{self._closing}]>", [f"THOUGHT: {other}"]
        return "thought", [f"thought[lazy]: /(?s:.*){closing}/"]

    def _mark(self, text: str, token_id: int | None) -> str:
        """A mark as a symbol: only a hidden token by its id, as forced ones that have a text are not rolled back right
        (llguidance 1.9.1 counts the bytes of the text where it has put those of the id).
        """
        return f"<[{token_id}]>" if token_id in self._hidden_ids else json.dumps(text, ensure_ascii=False)

    def _any_but(self, *token_ids: int | None) -> str:
        """Any token that is none of these and does not end the request."""
        return "<[^" + ",".join(str(i) for i in dict.fromkeys((*token_ids, *self._ends))) + "]>"


def no_limit(reason: str) -> BadRequest:
    """Return the error for a limit of the thinking where none can be held."""
    return BadRequest(f"{_LIMIT}: not supported: {reason}", param=_LIMIT, code="not_supported")


def _single_token(tokenizer: Tokenizer, mark: str) -> int | None:
    """The token that stands for a mark, None = it takes several."""
    token_ids = tokenizer.encode(mark, add_special_tokens=False)
    return token_ids[0] if len(token_ids) == 1 else None
