"""Drafts from a request's own text on a GPU: those of the definition, and of the CPU's index."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops.ngram import ngram_match
from fastdeploy_sd.ops.ngram_texts import NgramLengths, NgramTexts
from fastdeploy_sd.ops.reference import ngram as reference
from fastdeploy_sd.spec_decode.methods.ngram import NgramIndex
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import DraftTokens
from tests.ops.cuda_device import emulated

pytestmark = pytest.mark.slow

TABLE_ROWS, COLUMNS = 12, 4500


def texts(rng: np.random.Generator, has_prefix: bool) -> NgramTexts:
    """Few different tokens, phrases that come again, also across the border of two blocks; texts of 0 and 1 tokens."""
    table = rng.integers(0, 3, (TABLE_ROWS, COLUMNS)).astype(np.int32)
    table[4:8] = rng.integers(0, 40, (4, COLUMNS))
    phrase = rng.integers(50, 60, 9).astype(np.int32)
    for begin in (10, 700, 4092):
        table[5, begin : begin + 9] = phrase
    table[6] = 7
    num_tokens = rng.integers(2, 300, TABLE_ROWS).astype(np.int32)
    num_tokens[:7] = (0, 1, 2, 40, 4500, 4099, 4400)
    prefix = None
    if has_prefix:
        lens = rng.integers(0, 3, TABLE_ROWS)
        cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        prefix = DraftTokens(rng.integers(0, 3, lens.sum()).astype(np.int32), cu)
    table_rows = rng.permutation(TABLE_ROWS).astype(np.int32)
    most = rng.choice([0, 1, 4, 50], TABLE_ROWS).astype(np.int32)
    return NgramTexts(table, table_rows, num_tokens[table_rows], most, prefix)


def index_drafts(lengths: NgramLengths, x: NgramTexts) -> DraftTokens:
    """What the CPU's index drafts."""
    index = NgramIndex(TABLE_ROWS, *lengths, follows_copies=False)
    index.begin(np.arange(TABLE_ROWS, dtype=np.int32))
    return index.propose(ProposeInput((), x.table_rows, x.token_table, x.num_tokens, x.max_draft_len, prefix=x.prefix))


@pytest.mark.parametrize("lengths", [NgramLengths(1, 3, 1.0), NgramLengths(2, 5, 0.5), NgramLengths(4, 4, 100.0)])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_drafts_are_those_of_the_definition_and_of_the_index(lengths: NgramLengths, has_prefix: bool) -> None:
    x = texts(np.random.default_rng(int(sum(lengths)) + has_prefix), has_prefix)
    before = emulated().num_launches()
    with emulated().runs_ops():
        drafts, matched = ngram_match(x, lengths)
    assert emulated().num_launches() == before + 3
    want, want_matched = reference.ngram_match(x, lengths)
    np.testing.assert_array_equal(matched, want_matched)
    assert want.cu_num_draft[-1] > 5
    for expected in (want, index_drafts(lengths, x)):
        np.testing.assert_array_equal(drafts.cu_num_draft, expected.cu_num_draft)
        np.testing.assert_array_equal(drafts.token_ids, expected.token_ids)
