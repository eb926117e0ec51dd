"""Splits the text of an answer into its parts, and assigns its tokens to them. Knows no log-probabilities and no HTTP.

A parser is a function of the text: its output after n characters does not depend on the pieces in which they came. So a
stream adds up to the whole, and another instance can continue it from the shown text. No character is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastdeploy_sd.text.answer_parts import AnswerPart, Content, Reasoning
from fastdeploy_sd.text.reasoning import Splitter
from fastdeploy_sd.text.tool_calls.scanner import Scanner

T = TypeVar("T")
AlignedPart = tuple[AnswerPart, list[T]]


class AnswerParser:
    """State of one answer: first what was thought is taken out of its text, then the calls."""

    def __init__(self, splitter: Splitter | None = None, tools: Scanner | None = None) -> None:
        self._splitter = splitter
        self._tools = tools

    @property
    def is_over(self) -> bool:
        """Whether a call that equals an earlier one has ended the answer; see Scanner."""
        return self._tools is not None and self._tools.is_over

    def push(self, text: str) -> list[AnswerPart]:
        """Take more text; return the parts that became certain, in order."""
        if self._splitter is None:
            return self._said(text)
        return self._split(self._splitter.pieces(text))

    def finish(self) -> list[AnswerPart]:
        """Return what was held back at the end of the text."""
        parts = [] if self._splitter is None else self._split(self._splitter.end_pieces())
        return parts + ([] if self._tools is None else self._tools.finish())

    def _split(self, pieces: Sequence[tuple[str, str]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for thought, said in pieces:
            if thought:
                parts.append(Reasoning(thought))
            parts += self._said(said)
        return parts

    def _said(self, text: str) -> list[AnswerPart]:
        if self._tools is not None:
            return self._tools.push(text)
        return [Content(text)] if text else []


@dataclass(slots=True)
class _Piece(Generic[T]):
    """A piece of the text, and the tokens whose text begins there."""

    text: str
    tokens: list[T] = field(default_factory=list)


class TokenAligner(Generic[T]):
    """Parses the text of one answer token by token, and returns the tokens of each part of type Content.

    A token with any character in a part belongs to it, and so do those without text of their own in front of it.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._num_chars = 0  # of the text so far
        self._waiting: deque[tuple[int, T]] = deque()  # tokens whose text has not come, with its place
        self._pending: list[_Piece[T]] = []  # pieces of which no part has been told

    def push(self, text: str, tokens: Iterable[T] = (), offsets: Iterable[int] = ()) -> list[AlignedPart[T]]:
        """Take more text, and where in the whole each token's begins; return the parts that became certain."""
        self._waiting.extend(zip(offsets, tokens, strict=True))
        told: list[AlignedPart[T]] = []
        begin = 0
        while begin < len(text):
            begun: list[T] = []
            while self._waiting and self._waiting[0][0] <= self._num_chars:
                begun.append(self._waiting.popleft()[1])
            end = min(len(text), begin + self._waiting[0][0] - self._num_chars) if self._waiting else len(text)
            piece = text[begin:end]
            self._hold(piece, begun)
            told += [self._assigned(part) for part in self._parser.push(piece)]
            self._num_chars += len(piece)
            begin = end
        return _joined(told)

    def finish(self) -> list[AlignedPart[T]]:
        """Return what was held back at the end of the text."""
        return [self._assigned(part) for part in self._parser.finish()]

    def _hold(self, text: str, tokens: list[T]) -> None:
        if self._pending and not tokens:
            self._pending[-1].text += text  # more of the same token
        else:
            self._pending.append(_Piece(text, tokens))

    def _assigned(self, part: AnswerPart) -> AlignedPart[T]:
        if not isinstance(part, Content):
            del self._pending[:-1]  # the last piece may hold the beginning of another part
            return part, []
        text = "".join(piece.text for piece in self._pending)
        begin = len(text) - len(part.text) if text.endswith(part.text) else max(text.find(part.text), 0)
        end = begin + len(part.text)
        tokens: list[T] = []
        kept: list[_Piece[T]] = []
        place = 0
        for piece in self._pending:
            first, place = place, place + len(piece.text)
            if first < end and place > begin:
                tokens += piece.tokens
            if place > end:
                kept.append(_Piece(piece.text[max(end - first, 0) :], piece.tokens if first >= end else []))
        self._pending = kept
        return part, tokens


def _joined(told: Sequence[AlignedPart[T]]) -> list[AlignedPart[T]]:
    """Join neighbours of one kind, as if the text had been pushed at once."""
    joined: list[AlignedPart[T]] = []
    for part, tokens in told:
        before, known = joined[-1] if joined else (None, [])
        if isinstance(part, Content) and isinstance(before, Content):
            joined[-1] = Content(before.text + part.text), known + tokens
        elif isinstance(part, Reasoning) and isinstance(before, Reasoning):
            joined[-1] = Reasoning(before.text + part.text), []
        else:
            joined.append((part, tokens))
    return joined
