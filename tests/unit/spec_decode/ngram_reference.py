"""The rule of n-gram drafting written out, and texts that grow while it is asked. For tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.methods.ngram import NgramProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import I32, DraftTokens
from tests.values import i32

MAX_TOKENS = 400
NUM_SLOTS = 5


@dataclass(frozen=True)
class Rule:
    """As options; by default without what looks further than the text's last n tokens."""

    sizes: range = range(2, 6)
    max_factor: float = 64.0
    follows_copies: bool = False


def latest_match(text: Sequence[int], end: int, num_committed: int, sizes: range) -> tuple[int, int]:
    """The longest end of text[:end] that occurred before among the committed tokens: its length, and where it ends."""
    for n in reversed(sizes):
        for place in range(min(num_committed, end - 1), n - 1, -1):
            if list(text[place - n : place]) == list(text[end - n : end]):
                return n, place
    return 0, 0


def copy_by_definition(text: Sequence[int], num_committed: int, sizes: range) -> tuple[int, int]:
    """What the text goes on with, following the copies in it token by token: tokens that agreed, and where."""
    source = length = recent = 0
    credit = 1
    broken_at = broken_length = num_changed = 0
    n = place = 0
    for end in range(1, len(text) + 1):
        n, place = latest_match(text, end, num_committed, sizes)
        breaks = False
        if source:
            agrees = text[source] == text[end - 1]
            breaks = not agrees and recent > 0 and length > sizes[-1]
            if breaks:
                broken_at, broken_length, num_changed = source, length, 0
            if recent == 0:
                credit = min(4, credit + 1) if agrees else max(-4, credit - 1)
            ends = not agrees and (recent == 0 or length < sizes[-1] + 1)
            length, recent = (length + 1, recent + 1) if agrees else (length, 0)
            source = 0 if ends else source + 1
        if broken_length and not breaks:
            num_changed += 1
            ahead = [i for i in range(broken_at, min(broken_at + 4, end - 1)) if text[i] == text[end - 1]]
            is_chance = n <= 2 and (not source or (recent > 0 and length <= 2))
            if num_changed > 4:
                broken_length = 0
            elif ahead and is_chance:
                source, length, recent, broken_length = ahead[0] + 1, broken_length + 1, 1, 0
        sees_more = n > 0 and (length <= sizes[-1] or n > recent + 1)
        if n and (not source or (recent > 0 and sees_more)):
            source, length, recent = place, n, n
    if source and (recent > 0 or (credit > 0 and n <= 1)):
        return length, source
    return n, place


def drafts_by_definition(committed: Sequence[int], prefix: Sequence[int], max_len: int, rule: Rule) -> list[int]:
    text = [*committed, *prefix]
    if rule.follows_copies:
        length, source = copy_by_definition(text, len(committed), rule.sizes)
    else:
        length, source = latest_match(text, len(text), len(committed), rule.sizes)
    grown = list(text)
    for i in range(min(max_len, int(rule.max_factor * length))):
        grown.append(grown[source + i])
    return grown[len(text) :]


def ragged(rows: Sequence[Sequence[int]]) -> DraftTokens:
    flat = [token_id for row in rows for token_id in row]
    return DraftTokens(np.array(flat, np.int32), np.cumsum([0, *map(len, rows)]).astype(np.int32))


def proposer_of(rule: Rule = Rule(), num_table_rows: int = NUM_SLOTS) -> NgramProposer:
    config = SpeculativeConfig(
        method="ngram",
        min_ngram_size=rule.sizes[0],
        max_ngram_size=rule.sizes[-1],
        ngram_max_spec_factor=rule.max_factor,
        follow_copies=rule.follows_copies,
    )
    return NgramProposer(config, ProposerContext(num_table_rows, MAX_TOKENS, 1 << 31))


@dataclass
class Texts:
    """The committed tokens of every table row, and steps over some of them."""

    proposer: NgramProposer
    table: I32 = field(default_factory=lambda: np.zeros((NUM_SLOTS, MAX_TOKENS), np.int32))
    lengths: dict[int, int] = field(default_factory=dict)

    def begin(self, table_row: int, tokens: Sequence[int], num_prompt_tokens: int = 1) -> None:
        self.lengths[table_row] = 0
        self.append(table_row, tokens)
        self.proposer.begin([DraftRequest(f"r{table_row}", table_row, num_prompt_tokens, len(tokens))])

    def append(self, table_row: int, tokens: Sequence[int]) -> None:
        n = self.lengths[table_row]
        self.table[table_row, n : n + len(tokens)] = tokens
        self.lengths[table_row] = n + len(tokens)

    def text(self, table_row: int) -> list[int]:
        return [int(token_id) for token_id in self.table[table_row, : self.lengths[table_row]]]

    def step(
        self, table_rows: Sequence[int], max_draft_len: Sequence[int], prefixes: Sequence[Sequence[int]] | None = None
    ) -> list[list[int]]:
        x = ProposeInput(
            request_ids=tuple(f"r{table_row}" for table_row in table_rows),
            table_rows=i32(*table_rows),
            token_table=self.table,
            num_tokens=i32(*(self.lengths[table_row] for table_row in table_rows)),
            max_draft_len=i32(*max_draft_len),
            prefix=None if prefixes is None else ragged(prefixes),
        )
        drafts = self.proposer.propose(x)
        return [drafts.row(r).tolist() for r in range(len(table_rows))]

    def forget(self, table_row: int) -> None:
        self.lengths.pop(table_row, None)
        self.proposer.forget(i32(table_row))


def draft(tokens: Sequence[int], max_len: int, *, prefix: Sequence[int] = (), rule: Rule = Rule()) -> list[int]:
    """What one request with these committed tokens is drafted."""
    texts = Texts(proposer_of(rule))
    texts.begin(3, tokens)
    return texts.step([3], [max_len], [prefix] if prefix else None)[0]
