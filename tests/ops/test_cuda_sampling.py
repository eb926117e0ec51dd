"""How often sampling on a GPU reads logits, and that rows are drawn alike whether their chunks decide or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.ops.reference import sampling as reference
from tests.ops.cuda_device import emulated
from tests.ops.sampling_arrays import build_sampling_arrays

pytestmark = pytest.mark.slow

# Five chunks of 4096 tokens, the last one not whole.
VOCAB, ROWS = 17000, 4


def steep(rng: np.random.Generator) -> np.ndarray:
    """Some tokens are far above the others, as a model's are."""
    logits = rng.standard_normal((ROWS, VOCAB), np.float32) * 2
    for row in logits:
        row[rng.choice(VOCAB, 40, replace=False)] += 9
    return logits


def flat(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((ROWS, VOCAB), np.float32) * 0.1


def tied(rng: np.random.Generator) -> np.ndarray:
    """More equal tokens than a chunk lists."""
    return rng.integers(0, 3, (ROWS, VOCAB)).astype(np.float32)


def few(rng: np.random.Generator) -> np.ndarray:
    """A grammar left nine tokens, all in two chunks."""
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    logits[:, [3, 4, 5, 4095, 4096, 4097, 16000, 16100, 16999]] = rng.standard_normal((ROWS, 9), np.float32)
    return logits


# Name -> logits, settings, how often they are read at most: once, a chunk of five more for a draw of all tokens, and
# once for every 8 bits of a threshold that the listed tokens do not have.
CASES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "greedy": (flat, {"temperature": 0.0}, 1.0),
    "temperature": (steep, {"temperature": 0.8}, 1.25),
    "temperature-flat": (flat, {"temperature": 1.3}, 1.25),
    "temperature-few": (few, {}, 1.25),
    "top-k": (steep, {"top_k": 20}, 1.0),
    "top-k-few": (few, {"top_k": 20}, 1.0),
    "top-p": (steep, {"top_p": 0.8}, 1.0),
    "min-p": (steep, {"min_p": 0.1}, 1.0),
    "all": (steep, {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7}, 1.0),
    "top-k-flat": (flat, {"top_k": 5}, 1.0),
    "top-k-many": (flat, {"top_k": 3000, "top_p": 0.5}, 14.0),
    "top-p-flat": (flat, {"top_p": 0.7}, 9.0),
    "min-p-flat": (flat, {"min_p": 0.7}, 5.0),
    "top-k-tied": (tied, {"top_k": 7000}, 13.0),
    "top-p-tied": (tied, {"top_p": 0.9}, 12.0),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_read_once_where_the_listed_tokens_decide(case: str) -> None:
    make, settings, most_reads = CASES[case]
    rng = np.random.default_rng(5)
    rows: dict[str, Any] = {
        "logits": make(rng),
        "batch_id_per_output": np.arange(ROWS, dtype=np.int32),
        "positions": rng.integers(0, 2**31, ROWS).astype(np.int32),
        "sampling": build_sampling_arrays(ROWS, ROWS, vocab=VOCAB, seed=rng.integers(0, 2**63, ROWS), **settings),
    }
    with emulated().runs_ops():
        drawn = native.sample(**rows)
    num_reads = emulated().bytes_read["logits"] / rows["logits"].nbytes
    np.testing.assert_array_equal(drawn, reference.sample(**rows))
    assert num_reads <= most_reads


# Name -> logits, settings, how long the list may be, how often logits are read at most.
LISTINGS: dict[str, tuple[Any, dict[str, Any], int, float]] = {
    "greedy": (flat, {"temperature": 0.0}, 5, 1.0),
    "top-p": (steep, {"top_p": 0.8}, 32, 2.0),
    "flat": (flat, {"top_p": 0.9}, 32, 2.0),
    "few": (few, {"top_p": 0.7}, 32, 2.0),
    "all": (steep, {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7}, 20, 2.0),
    "top-k": (flat, {"top_k": 700, "top_p": 0.9}, 20, 2.0),
    "tied": (tied, {"top_p": 0.9}, 5, 14.0),
    "many": (steep, {"top_k": 3000, "top_p": 0.9}, 5, 14.0),
    "long": (flat, {"top_p": 0.1}, 1100, 12.0),
}


@pytest.mark.parametrize("case", LISTINGS)
def test_plausible_tokens_are_listed_in_two_reads(case: str) -> None:
    """But where more tokens than a list holds reach the bound, or more are wanted than bounds are found for."""
    make, settings, max_len, most_reads = LISTINGS[case]
    rng = np.random.default_rng(8)
    rows: dict[str, Any] = {
        "logits": make(rng)[:2],
        "batch_id_per_output": np.arange(2, dtype=np.int32),
        "positions": rng.integers(0, 2**31, 2).astype(np.int32),
        "sampling": build_sampling_arrays(2, 2, vocab=VOCAB, seed=rng.integers(0, 2**63, 2), **settings),
    }
    with emulated().runs_ops():
        found = native.top_p_candidates(**rows, max_candidate_len=max_len)
    num_reads = emulated().bytes_read["logits"] / rows["logits"].nbytes
    for got, want in zip(found, reference.top_p_candidates(**rows, max_candidate_len=max_len), strict=True):
        np.testing.assert_array_equal(got, want)
    assert num_reads <= most_reads


def test_lists_of_a_row_reach_every_chunk() -> None:
    """Biases and forbidden tokens at the borders of chunks, also of rows that are read again."""
    rng = np.random.default_rng(6)
    count = 12
    biases = [{0: 3.0, 4095: 2.0, 4096: 2.5, 8191: 4.0, 16999: 3.5}] * count
    masked = np.tile([4096, 1, 16383, 16384], count)
    rows: dict[str, Any] = {
        "logits": np.tile(flat(rng), (3, 1)),
        "batch_id_per_output": np.arange(count, dtype=np.int32),
        "positions": np.arange(count, dtype=np.int32),
        "sampling": build_sampling_arrays(
            count,
            count,
            vocab=VOCAB,
            temperature=[0.0, 1.0, 0.3] * 4,
            top_p=[1.0] * 4 + [0.5] * 4 + [0.01] * 4,
            seed=rng.integers(0, 2**63, count),
            biases=biases,
            cu_mask=np.arange(count + 1) * 4,
            mask_token_ids=masked,
        ),
    }
    with emulated().runs_ops():
        drawn = native.sample(**rows)
    np.testing.assert_array_equal(drawn, reference.sample(**rows))


def test_rows_are_drawn_by_three_launches() -> None:
    """However many there are; a fourth is for rows behind wrong drafts."""
    rng = np.random.default_rng(7)
    rows = (flat(rng), np.arange(ROWS, dtype=np.int32), np.arange(ROWS, dtype=np.int32))
    before = emulated().num_launches()
    with emulated().runs_ops():
        native.sample(*rows, build_sampling_arrays(ROWS, ROWS, vocab=VOCAB, top_p=0.7))
    assert emulated().num_launches() == before + 3
