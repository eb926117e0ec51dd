"""Tokens that are added to a vocabulary's own pieces, and cutting a text at them in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fastdeploy_sd.errors import BadRequest, CheckpointError

# Marks such as <think> and <|User|>, which many checkpoints do not flag as special: words between other characters.
# Added tokens of another form are text to the model: words, runs of spaces or line breaks, single characters.
_MARK = re.compile(r"[^\w\s\u2581](?=.*[^\W_]).*[^\w\s\u2581]", re.DOTALL)
# The Unicode property White_Space, which the tokenizers library strips; Python's strip() takes four more characters.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token found by its text before anything else is; without an id where the files name it so.

    `lstrip` and `rstrip` take the whitespace on that side; `single_word` does not count where it touches a word.
    """

    content: str
    token_id: int | None
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def is_control(self) -> bool:
        """Whether it steers the model: flagged special, or a mark such as <think>."""
        return self.special or _MARK.fullmatch(self.content) is not None


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt: the text of one control token that acts, or text in which none does."""

    text: str
    is_control: bool


_NOTHING = Segment("", is_control=False)


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a trie that finds the leftmost, then longest text; CheckpointError if they nest too deeply."""
    try:
        return re.compile(_alternatives(sorted(filter(None, set(tokens))), 0) or r"(?!)", re.DOTALL)
    except (RecursionError, OverflowError, re.error) as error:
        raise CheckpointError(f"added tokens: expected texts that can be searched for, got {error}") from None


def _alternatives(tokens: Sequence[str], start: int) -> str:
    """The pattern of sorted texts that agree before `start`, without that beginning."""
    branches, i = [], 0
    is_end = bool(tokens) and len(tokens[0]) == start
    i = int(is_end)
    while i < len(tokens):
        j = i
        while j < len(tokens) and tokens[j][start] == tokens[i][start]:
            j += 1
        shared = _shared_length(tokens[i], tokens[j - 1])  # of all between them too: they are sorted
        branches.append(re.escape(tokens[i][start:shared]) + _alternatives(tokens[i:j], shared))
        i = j
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not is_end else f"(?:{'|'.join(branches)})"
    return joined + "?" if is_end else joined


def _shared_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cut(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
    """Yield the stretches of `text` in order, none empty: (text, whether it is a match)."""
    start = 0
    for match in pattern.finditer(text):
        if match.start() > start:
            yield text[start : match.start()], False
        yield match[0], True
        start = match.end()
    if start < len(text):
        yield text[start:], False


def apply_borders(
    segments: Sequence[Segment],
    tokens: Mapping[str, AddedToken],
    whitespace: str | None = None,
    touches: Callable[[str], bool] = lambda neighbour: neighbour != " ",
) -> list[Segment]:
    """Return the segments, none empty, with each token's whitespace taken from its neighbours (None = all of strip()).

    `touches` says whether a neighbouring character makes a `single_word` token ordinary text.
    """
    parts = list(segments)
    for i, part in enumerate(parts):
        if not part.is_control:
            continue
        token = tokens[part.text]
        left = parts[i - 1] if i > 0 else _NOTHING
        right = parts[i + 1] if i + 1 < len(parts) else _NOTHING
        if token.rstrip and right.text:
            right = parts[i + 1] = replace(right, text=right.text.lstrip(whitespace))
        if token.lstrip and left.text:
            left = parts[i - 1] = replace(left, text=left.text.rstrip(whitespace))
        if token.single_word and left.text and touches(left.text[-1]):
            parts[i - 1 : i + 1] = Segment(left.text + part.text, is_control=False), _NOTHING
        elif token.single_word and right.text and touches(right.text[0]):
            parts[i : i + 2] = _NOTHING, Segment(part.text + right.text, is_control=False)
    return [part for part in parts if part.text]


def encode_spelled_out(text: str, pattern: re.Pattern[str], encode: Callable[[str], list[int] | None]) -> list[int]:
    """Return the ids of a text that contains tokens' texts, encoded in parts in which no token is found.

    It is cut after the first character of each occurrence; where a normalizer makes a token, the part is halved.
    `encode` returns None where a token is in a part; a single character that is a token raises BadRequest.
    """
    ids: list[int] = []
    parts = [*reversed(split_inside(text, pattern))]
    while parts:
        part = parts.pop()
        found = encode(part)
        if found is not None:
            ids += found
        elif len(part) > 1:
            parts += [part[len(part) // 2 :], part[: len(part) // 2]]
        else:
            raise BadRequest(f"messages: expected text without control tokens, got {part!r}", param="messages")
    return ids


def split_inside(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Cut `text` after the first character of every match of two characters or more, so that none is left whole."""
    parts, start = [], 0
    position = 0
    while match := pattern.search(text, position):
        position = match.start() + 1
        if len(match[0]) > 1:
            parts.append(text[start:position])
            start = position
    return [*parts, text[start:]]
