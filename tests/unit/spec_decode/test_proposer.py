from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.spec_decode.proposer import ProposeInput, ProposerContext, TargetStep
from fastdeploy_sd.types import DraftTokens
from tests.values import rows_of

CONTEXT = ProposerContext(max_num_seqs=4, max_model_len=8, vocab_size=100)


def test_an_unknown_method_is_named_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"method: expected one of .*naive.*, got 'niave' \(did you mean 'naive'\?\)"):
        create_proposer(SpeculativeConfig(method="niave"), CONTEXT)


def test_selected_rows_keep_their_columns_and_prefix() -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    column = np.array([1, 2, 3, 4], np.int32)
    x = ProposeInput(
        request_ids=("a", "b", "c", "d"),
        table_rows=np.array([3, 1, 0, 2], np.int32),
        token_table=table,
        num_tokens=column,
        max_draft_len=column * 10,
        num_draft_logprobs=column - 2,
        prefix=DraftTokens(np.arange(1, 7, dtype=np.int32), np.array([0, 2, 3, 3, 6], np.int32)),
        target=TargetStep(column, column, column, column),
    )
    y = x.select(np.array([1, 2, 3]))
    assert y.request_ids == ("b", "c", "d")
    texts = [y.token_table[table_row, :n].tolist() for table_row, n in zip(y.table_rows, y.num_tokens, strict=True)]
    assert texts == [[10, 11], [0, 1, 2], [20, 21, 22, 23]]
    assert y.max_draft_len.tolist() == [20, 30, 40]
    assert y.num_draft_logprobs is not None
    assert y.num_draft_logprobs.tolist() == [0, 1, 2]
    assert y.prefix is not None
    assert rows_of(y.prefix) == [[3], [], [4, 5, 6]]
    assert y.target is None
    assert {y.table_rows.dtype, y.num_tokens.dtype, y.prefix.token_ids.dtype, y.prefix.cu_num_draft.dtype} == {
        np.dtype(np.int32)
    }


def test_a_slice_of_rows_keeps_what_the_model_ran_of_them() -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    column = np.array([1, 2, 3, 4], np.int32)
    offsets = np.cumsum([0, *column], dtype=np.int32)
    target = TargetStep(offsets, column + 1, column + 2, column + 3)
    x = ProposeInput(("a", "b", "c", "d"), np.array([3, 1, 0, 2], np.int32), table, column, column, target=target)
    y = x.slice(1, 3)
    assert (y.request_ids, y.table_rows.tolist()) == (("b", "c"), [1, 0])
    part = y.target
    assert part is not None
    assert part.query_start_loc.tolist() == [1, 3, 6], "hidden rows stay where they are"
    assert (part.num_computed_tokens.tolist(), part.num_valid.tolist()) == ([3, 4], [4, 5])
    assert part.num_kv_slots.tolist() == [5, 6]
