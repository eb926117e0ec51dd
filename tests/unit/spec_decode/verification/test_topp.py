"""verify with strategy topp: plausible drafts, the window, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops.sampling import philox_uniform
from fastdeploy_sd.spec_decode.verify import VerifyRule
from tests.unit.spec_decode.verification.decoding import VOCAB, Decoding

TOPP = VerifyRule("topp", max_candidate_len=4, verify_window=2)
# Of the tokens 0, 1, 2 ...; the first three reach 0.8.
PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]


def fixed_logits(history: Sequence[int]) -> np.ndarray:
    """The same distribution after every history."""
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[: len(PROBABILITIES)] = np.log(PROBABILITIES)
    return logits


def decoding(num_requests: int = 1, rule: VerifyRule = TOPP, **columns: Any) -> Decoding:
    values = {"temperature": 1.0, "top_p": 0.8, "seed": 7} | columns
    prompts = [[50 + r] for r in range(num_requests)]
    return Decoding(
        prompts, {k: np.full(num_requests, v) for k, v in values.items()}, rule=rule, logits_of=fixed_logits
    )


def num_accepted(drafts: list[int], rule: VerifyRule = TOPP, **columns: Any) -> int:
    result, failed = decoding(rule=rule, **columns).step([drafts])
    assert failed == ()
    assert result.token_ids[:-1].tolist() == drafts[: result.num_accepted[0]]
    return int(result.num_accepted[0])


@pytest.mark.parametrize(
    ("columns", "plausible"),
    [
        ({}, 3),
        ({"top_p": 0.79}, 3),
        ({"top_p": 0.5}, 2),
        ({"top_p": 0.4}, 1),
        ({"top_p": 0.91}, 0),  # four candidates do not reach it
        ({"top_p": 1.0}, 4),
        ({"top_k": 2, "top_p": 1.0}, 2),
        ({"top_k": 2, "top_p": 0.5}, 1),  # 0.4 of 0.65
        ({"min_p": 0.5, "top_p": 1.0}, 2),
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.25}, 1),  # by the fourth powers 0 alone has 0.85
    ],
)
def test_plausible_drafts_are_kept(columns: dict[str, float], plausible: int) -> None:
    rule = VerifyRule("topp", max_candidate_len=4, verify_window=40)  # no window is ever full
    for token in range(6):
        assert num_accepted([token], rule, **columns) == (token < plausible)


@pytest.mark.parametrize(
    ("drafts", "accepted"),
    [
        ([1, 0, 0], 3),
        ([1, 0, 0, 0], 4),
        ([0, 1, 0, 0], 4),
        ([1, 0, 0, 1, 0, 0], 6),  # judging goes on at the row right after a window
        ([1, 0, 0, 1], 3),
        ([1, 0, 0, 2], 3),
        ([1, 0, 1], 0),
        ([1, 1, 0, 0], 0),
        ([1, 0], 0),  # too few are left
        ([1], 0),
        ([2, 0, 0], 0),  # third best
    ],
)
def test_a_second_best_draft_is_kept_when_the_window_after_it_is_best(drafts: list[int], accepted: int) -> None:
    assert num_accepted(drafts, top_p=0.4) == accepted


def test_a_window_of_no_drafts_keeps_every_second_best() -> None:
    assert num_accepted([1, 1, 0, 2], VerifyRule("topp", verify_window=0), top_p=0.4) == 3


def test_a_token_that_a_filter_removed_is_no_second_candidate() -> None:
    assert num_accepted([1, 0, 0], top_k=1) == 0
    assert num_accepted([1, 0, 0], min_p=0.9) == 0
    assert num_accepted([1, 0, 0], temperature=0.0) == 0


def test_a_single_candidate_leaves_no_second() -> None:
    assert num_accepted([1, 0, 0], VerifyRule("topp", max_candidate_len=1), top_p=0.4) == 0


@pytest.mark.parametrize(("top_p", "usable"), [(0.5, 2), (0.8, 3), (0.95, 0), (1.0, 4)])
def test_the_token_after_the_drafts_is_the_usable_one_that_reaches_u_times_top_p(top_p: float, usable: int) -> None:
    sums = np.cumsum(PROBABILITIES)[:usable]
    for seed in range(200):
        result, _ = decoding(top_p=top_p, seed=seed).step([[]])
        reaching = np.flatnonzero(sums >= philox_uniform(seed, 1) * top_p)
        assert result.token_ids.tolist() == (reaching[:1].tolist() or [0])


def test_greedy_requests_get_plain_decoding() -> None:
    zero = {"temperature": np.zeros(3)}
    prompts = [[1, 2], [5], [9]]
    plain = Decoding(prompts, zero).run(30, lambda tokens: [])
    rng = np.random.default_rng(1)
    guesses = Decoding(prompts, zero, rule=TOPP).run(
        30, lambda tokens: [*plain_after(prompts, plain, tokens, int(rng.integers(0, 5))), int(rng.integers(0, VOCAB))]
    )
    assert guesses == plain


def plain_after(prompts: list[list[int]], plain: list[list[int]], tokens: list[int], count: int) -> list[int]:
    (known,) = [p + o for p, o in zip(prompts, plain, strict=True) if tokens[: len(p)] == p]
    return known[len(tokens) :][:count]


def test_the_seed_reproduces_the_output_in_any_company() -> None:
    def drafter(tokens: list[int]) -> list[int]:
        return [tokens[-1] % 3, 0, 1]

    alone = [decoding(seed=seed).run(30, drafter)[0] for seed in (3, 4)]
    together = Decoding(
        [[50], [50]],
        {"temperature": np.ones(2), "top_p": np.full(2, 0.8), "seed": np.array([3, 4])},
        rule=TOPP,
        logits_of=fixed_logits,
    )
    assert together.run(30, drafter) == alone
    assert alone[0] != alone[1]
