"""Bad arguments of the sampling ops and the batch maps: refused before anything is written, naming the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.ops import batch as ops_batch
from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.ops.batch import APPEND_TOKENS
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.reference.batch import Tables
from fastdeploy_sd.types import DraftTokens
from tests.ops.cases.batch import prepare_natively
from tests.ops.sampling_arrays import build_sampling_arrays
from tests.values import i32

LOGITS = np.zeros((2, 10), np.float32)
TABLES = Tables(np.zeros((2, 16), np.int32), i32(4, 9), np.array([[5], [2]], np.int32))
STEP: dict[str, Any] = {
    "tables": TABLES,
    "table_rows": i32(0, 1),
    "num_computed": i32(3, 0),
    "num_new": i32(3, 4),
    "draft": DraftTokens(i32(7, 8), i32(0, 2, 2)),
    "block_size": 16,
}
PENALISED = build_sampling_arrays(1, 2, count_rows=0, token_counts=np.zeros((1, 10)))


@pytest.mark.parametrize(
    ("request_ids", "positions", "message"),
    [
        (i32(0, 2), i32(5, 6), "batch_id_per_output"),
        (i32(-1, 0), i32(5, 6), "batch_id_per_output"),
        (i32(0), i32(5, 6), "batch_id_per_output"),
        (i32(0, 1), i32(5, -1), "positions"),
        (i32(0, 1), i32(5), "positions"),
    ],
)
def test_sample_refuses_rows(request_ids: np.ndarray, positions: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: expected"):
        native.sample(LOGITS, request_ids, positions, build_sampling_arrays(2, 2, vocab=10))


@pytest.mark.parametrize(
    ("columns", "positions", "max_candidate_len", "message"),
    [
        ({}, i32(5, 6), 0, "max_candidate_len: expected a positive number"),
        ({}, i32(5, 6), -3, "max_candidate_len: expected a positive number"),
        ({}, i32(5, -1), 2, "positions: expected"),
        ({"top_p": 0.0}, i32(5, 6), 2, r"top_p: expected a number in \(0, 1\]"),
    ],
)
def test_top_p_candidates_refuses(
    columns: dict[str, Any], positions: np.ndarray, max_candidate_len: int, message: str
) -> None:
    sampling = build_sampling_arrays(2, 2, vocab=10, **columns)
    with pytest.raises(ValueError, match=message):
        native.top_p_candidates(LOGITS, i32(0, 1), positions, sampling, max_candidate_len)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cu_mask": i32(0, 0, 1), "mask_token_ids": i32(10)}, "mask_token_ids: expected ids of the vocabulary"),
        ({"cu_mask": i32(0, 2, 1), "mask_token_ids": i32(1)}, "cu_mask: expected 0 and rising offsets"),
        ({"cu_mask": i32(0, 0)}, "cu_mask: expected"),
        ({"allowed_rows": i32(-1, 0)}, "allowed_rows: expected rows of allowed_bits or -1"),
        ({"allowed_rows": i32(-2, -1)}, "allowed_rows: expected rows of allowed_bits or -1"),
        ({"allowed_rows": i32(-1)}, "allowed_rows: expected"),
        ({"allowed_bits": np.zeros((1, 0))}, "allowed_bits: expected a bit for every token"),
        ({"biases": [{-1: 1.0}]}, "bias_token_ids: expected ids"),
        ({"biases": [{1: 101.0}]}, "bias_values: expected numbers in -100..100"),
        ({"bias_values": np.zeros((2, 6))}, "bias_values: expected"),
        ({"num_bias": i32(7)}, "num_bias: expected 0..max_num_bias"),
        ({"table_rows": i32(1)}, "table_rows: expected rows of the request columns"),
        ({"count_rows": 0}, "count_rows: expected a row of token_counts"),
        ({"count_rows": 0, "token_counts": np.zeros((1, 9))}, "token_counts: expected"),
        (
            {"count_rows": 0, "token_counts": np.zeros((1, 10)), "repetition_penalty": 0.0},
            "repetition_penalty: expected a number in 0.001..1000",
        ),
    ],
)
def test_rules_are_refused(columns: dict[str, Any], message: str) -> None:
    sampling = build_sampling_arrays(1, 2, vocab=10, **columns)
    with pytest.raises(ValueError, match=message):
        native.process_logits(LOGITS, i32(0, 1), i32(0, 2), DraftTokens(i32(3), i32(0, 1)), sampling)
    with pytest.raises(ValueError, match=message):
        native.sample(LOGITS, i32(0, 0), i32(5, 6), sampling)
    with pytest.raises(ValueError, match=message):
        native.top_p_candidates(LOGITS, i32(0, 0), i32(5, 6), sampling, 2)


@pytest.mark.parametrize(
    ("cu_num_logits", "draft", "message"),
    [
        (i32(0, 2), DraftTokens.none(1), "cu_num_logits: expected at most drafts"),
        (i32(0, 1), DraftTokens.none(1), "cu_num_logits: expected the rows of logits last"),
        (i32(0, 2), DraftTokens(i32(10), i32(0, 1)), "draft_token_ids: expected ids of the vocabulary"),
        (i32(0, 2), DraftTokens(i32(1), i32(1, 1)), "cu_num_draft: expected 0 and rising offsets"),
    ],
)
def test_drafts_are_refused(cu_num_logits: np.ndarray, draft: DraftTokens, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.process_logits(LOGITS, i32(0, 1), cu_num_logits, draft, PENALISED)
    with pytest.raises(ValueError, match=message):
        native.sample(LOGITS, i32(0, 0), i32(5, 6), PENALISED, DraftedRows(cu_num_logits, draft))


@pytest.mark.parametrize("row", [-1, 2])
def test_process_logits_refuses_rows_outside(row: int) -> None:
    sampling = build_sampling_arrays(2, 2, vocab=10)
    with pytest.raises(ValueError, match="rows: expected rows of logits"):
        native.process_logits(LOGITS, i32(0, row), i32(0, 1, 2), DraftTokens.none(2), sampling)


@pytest.mark.parametrize(
    ("rows", "token_ids", "num_top", "message"),
    [
        (i32(0, 1), i32(0, 10), 1, "token_ids"),
        (i32(0, 1), i32(0, -1), 1, "token_ids"),
        (i32(0, 1), i32(0, 1), 11, "num_top"),
        (i32(0, 1), i32(0, 1), -1, "num_top"),
        (i32(0, 2), i32(0, 1), 1, "rows"),
        (i32(-1, 1), i32(0, 1), 1, "rows"),
    ],
)
def test_token_logprobs_refuses(rows: np.ndarray, token_ids: np.ndarray, num_top: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: expected"):
        native.token_logprobs(LOGITS, rows, token_ids, num_top)


def test_prepare_batch_accepts_the_rows_that_the_next_test_breaks() -> None:
    assert prepare_natively(**STEP).seq_lens.tolist() == [6, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_computed": i32(-1, 0)}, "num_computed: expected >= 0"),
        ({"num_new": i32(3, 0)}, "num_new: expected >= 1"),
        ({"num_new": i32(3, 10)}, r"num_new: expected computed \+ new <= committed"),
        ({"tables": TABLES._replace(num_tokens=i32(5, 9))}, "num_draft: expected drafts only where every known"),
        ({"num_computed": i32(4, 0), "num_new": i32(2, 4)}, "num_draft: expected less than num_new"),
        ({"tables": TABLES._replace(num_tokens=i32(4, 17))}, "num_tokens: expected at most a row of token_table"),
        ({"table_rows": i32(0, 2)}, "table_rows: expected rows of token_table"),
        ({"table_rows": i32(-1, 0)}, "table_rows: expected rows of token_table"),
        (
            {"tables": TABLES._replace(blocks=np.array([[5], [-1]], np.int32))},
            "block_tables: expected blocks .* got -1",
        ),
        ({"tables": TABLES._replace(blocks=np.zeros((2, 0), np.int32))}, "block_tables: expected .* got too few"),
        ({"draft": DraftTokens(i32(7, 8), i32(0, 3, 2))}, "cu_num_draft: expected 0 and rising offsets"),
        ({"table_rows": i32(0)}, "num_computed: expected"),
        ({"block_size": 0}, "block_size: expected a positive number"),
    ],
)
def test_prepare_batch_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_natively(**{**STEP, **change})


@pytest.mark.parametrize("index", [-1, 2])
def test_gather_output_rows_refuses(index: int) -> None:
    with pytest.raises(ValueError, match="indices: expected rows of x"):
        ops_batch.gather_output_rows(LOGITS, i32(0, index))
    with pytest.raises(ValueError, match="indices: expected rows of x"):
        ops_batch.gather_output_rows(paddle.to_tensor(LOGITS), i32(0, index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table_rows": i32(0, 2)}, "table_rows: expected rows of token_table"),
        ({"table_rows": i32(0)}, "cu_num_output: expected"),
        ({"table_rows": i32(0, 0)}, "table_rows: expected every one once"),
        ({"cu_num_output": i32(0, 2, 1)}, "cu_num_output: expected 0 and rising offsets"),
        ({"token_ids": i32(3, 10, 1)}, "token_ids: expected ids of the vocabulary"),
        ({"count_rows": i32(1, -1)}, "count_rows: expected a row of token_counts"),
        ({"cu_num_output": i32(0, 0, 3)}, "num_tokens: expected room for the output"),
    ],
)
def test_append_tokens_refuses_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    arguments = {
        "tokens": np.zeros((2, 16), np.int32),
        "num_tokens": i32(5, 15),
        "max_total": i32(16, 16),
        "count_rows": i32(0, -1),
        "token_counts": np.zeros((1, 10), np.int32),
        "table_rows": i32(0, 1),
        "token_ids": i32(3, 4, 1),
        "cu_num_output": i32(0, 2, 3),
        "planned_drafts": i32(2, 2),
    }
    with pytest.raises(ValueError, match=message):
        APPEND_TOKENS(**{**arguments, **change})
    assert not arguments["tokens"].any()
    assert arguments["num_tokens"].tolist() == [5, 15]
    APPEND_TOKENS(**arguments)
    assert arguments["num_tokens"].tolist() == [7, 16]
