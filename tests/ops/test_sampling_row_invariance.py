"""The bits of a row depend on nothing but the row: not on the other rows, their order or the threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.types import DraftTokens, SamplingArrays
from tests.ops.backends import isa, threads
from tests.ops.cases.sampling import offsets
from tests.ops.cases.sampling_rows import logits_of
from tests.ops.sampling_arrays import build_sampling_arrays

VOCAB = 20001
ROWS = 13


def request_columns(sampling: SamplingArrays, requests: np.ndarray) -> SamplingArrays:
    """The same columns for some of the requests, with a row each and their rules but biases and masks."""
    picked = ("temperature", "top_k", "top_p", "min_p", "seed", "count_rows", "token_counts", "frequency_penalty")
    columns = {name: getattr(sampling, name) for name in picked}
    per_request = {name: column[requests] for name, column in columns.items() if name != "token_counts"}
    return build_sampling_arrays(len(requests), len(requests), vocab=VOCAB, **(columns | per_request))


def sampled(logits: np.ndarray, positions: np.ndarray, sampling: SamplingArrays, rows: np.ndarray) -> tuple[Any, ...]:
    requests = np.arange(len(rows), dtype=np.int32)
    return (native.sample(logits[rows], requests, positions[rows], request_columns(sampling, rows)),)


def step() -> tuple[np.ndarray, np.ndarray, SamplingArrays]:
    rng = np.random.default_rng(8)
    logits = np.concatenate([logits_of(rng, kind, ROWS, VOCAB)[i::4] for i, kind in enumerate(("steep", "flat") * 2)])
    sampling = build_sampling_arrays(
        ROWS,
        ROWS,
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0], ROWS),
        top_k=rng.choice([0, 0, 40, 1000], ROWS),
        top_p=rng.choice([1.0, 0.95, 0.5], ROWS),
        min_p=rng.choice([0.0, 0.01], ROWS),
        seed=rng.integers(0, 2**63, ROWS),
        frequency_penalty=0.3,
        count_rows=rng.choice([-1, 0, 1], ROWS),
        token_counts=rng.integers(0, 3, (2, VOCAB)),
    )
    return logits, rng.integers(0, 10**6, ROWS).astype(np.int32), sampling


def assert_rows_are_their_own(level: str, run: Callable[[np.ndarray], tuple[np.ndarray, ...]]) -> None:
    """`run(rows)` on single rows, on all, on a permutation and on 1, 2, 3 threads: equal bits."""
    with isa(level), threads(1):
        alone = [run(np.array([row])) for row in range(ROWS)]
    permutation = np.random.default_rng(9).permutation(ROWS)
    for count in (1, 2, 3):
        for rows in (np.arange(ROWS), permutation, permutation[:5], np.repeat(permutation[:3], 7)):
            with isa(level), threads(count):
                together = run(rows)
            for i, row in enumerate(rows):
                for got, want in zip(together, alone[row], strict=True):
                    assert got[i].tobytes() == want[0].tobytes(), f"row {row} of {len(rows)} on {count} threads"


@pytest.mark.parametrize("level", library.available_isas())
def test_sample(level: str) -> None:
    logits, positions, sampling = step()
    # Many positions per row: a wrong sum shows only where it moves a draw over a border.
    for shift in range(0, 200, 20):
        assert_rows_are_their_own(level, partial(sampled, logits, positions + np.int32(shift), sampling))


@pytest.mark.parametrize("level", library.available_isas())
def test_top_p_candidates(level: str) -> None:
    logits, positions, sampling = step()

    def run(rows: np.ndarray, shift: int, max_candidate_len: int) -> tuple[np.ndarray, ...]:
        requests, moved = np.arange(len(rows), dtype=np.int32), positions[rows] + np.int32(shift)
        columns = request_columns(sampling, rows)
        return native.top_p_candidates(logits[rows], requests, moved, columns, max_candidate_len)

    for shift, max_candidate_len in ((0, 5), (1, 300), (2, 300)):
        assert_rows_are_their_own(level, partial(run, shift=shift, max_candidate_len=max_candidate_len))


@pytest.mark.parametrize("level", library.available_isas())
def test_token_logprobs(level: str) -> None:
    logits, _, _ = step()
    token_ids = np.random.default_rng(10).integers(0, VOCAB, ROWS).astype(np.int32)
    assert_rows_are_their_own(level, lambda rows: native.token_logprobs(logits, np.asarray(rows), token_ids[rows], 20))


@pytest.mark.parametrize("level", library.available_isas())
def test_process_logits(level: str) -> None:
    logits, _, _ = step()
    rng = np.random.default_rng(11)
    counts = rng.integers(0, 3, (ROWS, VOCAB)).astype(np.int32)
    repetition, presence = rng.uniform(0.5, 2, ROWS), rng.uniform(-2, 2, ROWS)

    def run(rows: np.ndarray) -> tuple[np.ndarray, ...]:
        sampling = build_sampling_arrays(
            len(rows),
            len(rows),
            repetition_penalty=repetition[rows],
            presence_penalty=presence[rows],
            frequency_penalty=0.3,
            count_rows=rows,
            token_counts=counts,
        )
        every, one_each = np.arange(len(rows), dtype=np.int32), offsets(np.ones(len(rows), int))
        return (native.process_logits(logits[rows], every, one_each, DraftTokens.none(len(rows)), sampling),)

    assert_rows_are_their_own(level, run)
