"""The automata against the definition under random operations, checked after each."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from fastdeploy_sd.spec_decode.methods.suffix_drafter import SuffixDrafter, SuffixLimits, SuffixRule
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import DraftTokens
from tests.unit.spec_decode.suffix_reference import Output, Reference

pytestmark = pytest.mark.slow

NUM_SLOTS = 3
MAX_LEN = 60
NUM_STEPS = 100
COPIED = 0.9
SALTS = (b"a" * 16, b"b" * 16)


class Pair:
    """A drafter and its definition, given the same operations."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.num_tokens_known = int(rng.choice([1, 2, 3, 4, 40, 40]))
        self.copy_distance = int(rng.choice([9, 14, 20, MAX_LEN]))
        self.rule = SuffixRule(
            max_context=int(rng.choice([1, 3, 6, 64])),
            max_factor=float(rng.choice([0.5, 1.0, 2.5])),
            min_token_prob=float(rng.choice([0.0, 0.1, 0.5, 1.0])),
            follows_copies=bool(rng.random() < 0.7),
        )
        self.limits = SuffixLimits(int(rng.choice([-1, 0, 1, 2, 3, 17])), 1 << 20)
        self.drafter = self._make()
        self.reference = self._define()
        self.table = np.full((NUM_SLOTS, MAX_LEN), -1, np.int32)
        self.num_tokens = [0] * NUM_SLOTS

    def _make(self) -> SuffixDrafter:
        return SuffixDrafter(NUM_SLOTS, self.num_tokens_known, self.rule, self.limits)

    def _define(self) -> Reference:
        rule = self.rule
        return Reference(
            rule.max_context, rule.max_factor, rule.min_token_prob, self.limits.max_outputs, rule.follows_copies
        )

    def begin(self, table_row: int) -> None:
        """Also a request that comes back: some of its private tokens may be output."""
        self.num_tokens[table_row] = 0
        num_private, salt = int(self.rng.integers(0, 6)), int(self.rng.integers(0, 2))
        self.append(table_row, num_private)
        ends = tuple(self.rng.integers(0, self.num_tokens_known, int(self.rng.integers(0, 3))).tolist())
        first_end = int(self.rng.integers(0, 25))
        self.drafter.begin(table_row, num_private, SALTS[salt], ends, first_end)
        self.reference.begin(table_row, num_private, salt, (ends, first_end))

    def forget(self) -> None:
        table_rows = self.rng.integers(0, NUM_SLOTS, 2).astype(np.int32)
        self.drafter.forget(table_rows)
        for table_row in table_rows:
            self.reference.own.pop(int(table_row), None)

    def append(self, table_row: int, count: int) -> None:
        """Random tokens, or a copy of earlier ones with some replaced."""
        start = self.num_tokens[table_row]
        tokens = self.rng.integers(0, self.num_tokens_known, count)
        if self.copy_distance <= start:
            is_copied = self.rng.random(count) < COPIED
            earlier = self.table[table_row, start - self.copy_distance :][:count]
            tokens[is_copied] = earlier[is_copied]
        self.table[table_row, start : start + count] = tokens
        self.num_tokens[table_row] = start + count

    def step(self) -> None:
        table_rows = [s for s in self.rng.permutation(NUM_SLOTS).tolist() if s in self.reference.own]
        table_rows = table_rows[: int(self.rng.integers(0, NUM_SLOTS + 1))]
        for table_row in table_rows:
            self.append(table_row, min(int(self.rng.integers(0, 7)), MAX_LEN - self.num_tokens[table_row]))
            known = self.reference.own[table_row].text.num_tokens
            self.reference.read(table_row, self.table[table_row, known : self.num_tokens[table_row]].tolist())
        budgets = self.rng.integers(0, 7, len(table_rows)).astype(np.int32)
        prefixes = [self.rng.integers(0, self.num_tokens_known, int(n)).tolist() for n in self.rng.integers(0, 3, 3)]
        prefixes = prefixes[: len(table_rows)] if self.rng.random() < 0.3 else [[] for _ in table_rows]
        cu_prefix = np.cumsum([0, *map(len, prefixes)]).astype(np.int32)
        prefix = DraftTokens(np.array([token for prefix in prefixes for token in prefix], np.int32), cu_prefix)
        counts = np.array([self.num_tokens[table_row] for table_row in table_rows], np.int32)
        given = prefix if cu_prefix[-1] else None
        x = ProposeInput((), np.array(table_rows, np.int32), self.table, counts, budgets, prefix=given)
        drafts = self.drafter.propose(x)
        for r, table_row in enumerate(table_rows):
            expected = self.reference.draft(table_row, int(budgets[r]), prefixes[r])
            assert drafts.row(r).tolist() == expected, (table_row, self.table[table_row, : counts[r]])

    def restart(self) -> None:
        """Carry the shared texts to a new drafter; requests end."""
        sequences = self.drafter.export_sequences()
        old, self.drafter = self.reference, self._make()
        self.drafter.import_sequences(sequences)
        exported = [(s.salt, tokens) for s in old.shards for tokens in s.text.sequences]
        assert len(exported) == len(sequences.salt_digests)
        self.reference = self._define()
        for q, (salt, tokens) in enumerate(exported):
            assert sequences.salt_digests[q].tobytes() == SALTS[salt]
            begin, end = sequences.cu_tokens[q : q + 2]
            assert sequences.token_ids[begin:end].tolist() == tokens
            output = Output()
            for token in tokens:
                self.reference.share(salt, token, output)

    def check(self) -> None:
        self.drafter.check_integrity()
        stats = self.drafter.stats()
        shards = self.reference.shards
        assert stats.num_tokens == sum(s.text.num_tokens for s in shards)
        assert stats.num_outputs == self.reference.num_outputs()
        assert stats.num_sequences == sum(len(s.text.sequences) for s in shards)
        assert stats.num_shards == len(shards)
        string = tuple(self.rng.integers(0, self.num_tokens_known, int(self.rng.integers(1, 4))).tolist())
        for table_row, own in self.reference.own.items():
            texts = [own.text, *(s.text for s in self.reference.of_salt(own.salt))]
            expected = [len(text.ends(string)) for text in texts]
            assert self.drafter.count(table_row, np.array(string, np.int32)) == expected


@pytest.mark.parametrize("seed", range(40))
def test_drafts_and_counts_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = Pair(rng)
    for _ in range(NUM_STEPS):
        action = rng.random()
        if action < 0.1:
            pair.begin(int(rng.integers(0, NUM_SLOTS)))
        elif action < 0.15:
            pair.forget()
        elif action < 0.17:
            pair.restart()
        else:
            pair.step()
        pair.check()


def test_counts_with_many_different_continuations() -> None:
    """States with up to 200 transitions, which are kept in another way than the few of the tests above."""
    rng = np.random.default_rng(7)
    text = (rng.zipf(1.2, 4000) % 200).astype(np.int32)
    drafter = SuffixDrafter(1, 200, SuffixRule(), SuffixLimits(0, 0))
    drafter.begin(0, len(text), SALTS[0])
    lengths = np.array([len(text)], np.int32)
    zero = np.zeros(1, np.int32)
    drafter.propose(ProposeInput((), zero, text[None], lengths, zero))
    drafter.check_integrity()
    for n in (1, 2, 3):
        counts = Counter(map(tuple, sliding_window_view(text, n).tolist()))
        for string, count in counts.items():
            assert drafter.count(0, np.array(string, np.int32)) == [count]
    assert drafter.count(0, np.array([0, 0, 0, 0, 0, 0, 199], np.int32)) == [0]
