"""What `sample` draws follows the distribution its filters define, counted over many positions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.ops.reference import sampling as reference
from tests.ops.backends import isa, threads
from tests.ops.sampling_arrays import build_sampling_arrays

NUM_DRAWS = 8000
# Chi-square exceeded with probability 1e-5, by degrees of freedom.
CRITICAL = {0: 0.0, 1: 19.51, 2: 23.03, 3: 25.90, 4: 28.47, 5: 30.86, 6: 33.11, 7: 35.26}
# Where seed 0 has its lowest and highest number among the first 2^24 positions: 3.4e-8 and 1 - 7.4e-8.
POSITION_OF_LOW, POSITION_OF_HIGH = 14883995, 4826271
# Two ties, one of them for the third place, and a forbidden token.
LOGITS = [1.0, -0.5, 2.0, -math.inf, 1.0, 0.25, -3.0, 1.0]


def enumerate_probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Probabilities by token id, from the sorted list of tokens."""
    best = max(LOGITS)
    weight = {i: math.exp((x - best) / temperature) for i, x in enumerate(LOGITS) if x > -math.inf}
    order = sorted((i for i in weight if weight[i] >= min_p), key=lambda i: (-weight[i], i))
    order = order[: top_k or None]
    total = sum(weight[i] for i in order)
    reached, nucleus = 0.0, []
    for i in order:
        if reached >= top_p * total:
            break
        nucleus.append(i)
        reached += weight[i]
    kept = sum(weight[i] for i in nucleus)
    return {i: weight[i] / kept for i in nucleus}


def draw(level: str, vocab_logits: list[float], **columns: Any) -> np.ndarray:
    logits = np.tile(np.array(vocab_logits, np.float32), (NUM_DRAWS, 1))
    sampling = build_sampling_arrays(1, NUM_DRAWS, vocab=len(vocab_logits), seed=11, **columns)
    with isa(level), threads(1):
        return native.sample(logits, np.zeros(NUM_DRAWS, np.int32), np.arange(NUM_DRAWS, dtype=np.int32), sampling)


@pytest.mark.parametrize("level", library.available_isas())
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    list(itertools.product([0.5, 1.0, 2.5], [0, 1, 3, 5], [1.0, 0.8, 0.3], [0.0, 0.3])),
)
def test_counts_follow_the_enumerated_distribution(
    level: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    want = enumerate_probabilities(temperature, top_k, top_p, min_p)
    drawn = draw(level, LOGITS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    counts = np.bincount(drawn, minlength=len(LOGITS))
    assert set(np.flatnonzero(counts)) <= set(want)
    expected = np.array([want[i] * NUM_DRAWS for i in want])
    chi_square = ((counts[list(want)] - expected) ** 2 / expected).sum()
    assert chi_square <= CRITICAL[len(want) - 1]


@pytest.mark.parametrize("top_k", [0, 1, 3, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_reference_distribution_is_the_enumerated_one(top_k: int, top_p: float, min_p: float) -> None:
    sampling = build_sampling_arrays(1, 1, temperature=2.5, top_k=top_k, top_p=top_p, min_p=min_p)
    got = reference.distribution(np.array(LOGITS), sampling, 0)
    want = enumerate_probabilities(2.5, top_k, top_p, min_p)
    np.testing.assert_allclose(got, [want.get(i, 0.0) for i in range(len(LOGITS))], rtol=1e-12)


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75])
def test_equal_tokens_that_make_up_top_p_are_enough(top_p: float) -> None:
    sampling = build_sampling_arrays(1, 1, top_p=top_p)
    for vocab in range(1, 300):
        kept = np.flatnonzero(reference.distribution(np.zeros(vocab), sampling, 0))
        assert kept.tolist() == list(range(math.ceil(vocab * top_p)))


@pytest.mark.parametrize("level", library.available_isas())
def test_ties_at_the_border_keep_the_lowest_ids(level: str) -> None:
    equal = [0.0] * 300
    assert set(draw(level, equal, top_k=3)) == {0, 1, 2}
    assert set(draw(level, equal, top_p=0.01)) == {0, 1, 2}
    assert set(draw(level, equal, temperature=0.0)) == {0}


@pytest.mark.parametrize("level", library.available_isas())
@pytest.mark.parametrize(
    ("columns", "num_kept"),
    [
        ({}, 20001),
        ({"min_p": 0.5}, 20001),
        ({"top_k": 50}, 50),
        ({"top_p": 0.5}, 10001),
        ({"top_k": 50, "top_p": 0.5}, 25),
    ],
)
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_kept_token(
    level: str, columns: dict[str, Any], num_kept: int
) -> None:
    # Equal logits, with forbidden tokens before and after them: the kept ones are the first `num_kept` of them.
    logits = np.full((2, 20100), -np.inf, np.float32)
    logits[:, 40:20041] = 3.0
    positions = np.array([POSITION_OF_LOW, POSITION_OF_HIGH], np.int32)
    with isa(level):
        drawn = native.sample(
            logits, np.zeros(2, np.int32), positions, build_sampling_arrays(1, 2, vocab=logits.shape[1], **columns)
        )
    assert drawn.tolist() == [40, 40 + num_kept - 1]


@pytest.mark.parametrize("level", library.available_isas())
def test_a_tiny_temperature_is_greedy_but_for_exact_ties(level: str) -> None:
    assert set(draw(level, [1.0, 2.0, 2.0, -1.0], temperature=1e-9)) == {1, 2}
    assert set(draw(level, [3e38, -3e38, 1.0], temperature=1e-9)) == {0}


@pytest.mark.parametrize("level", library.available_isas())
def test_a_token_further_below_the_maximum_than_floats_reach_is_never_drawn(level: str) -> None:
    assert set(draw(level, [3e38, -3e38, 3e38], temperature=1e6)) == {0, 2}
