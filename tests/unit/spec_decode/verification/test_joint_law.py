"""target_match preserves the model's joint law whatever is drafted; the same test exposes topp, which does not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.verify import VerifyRule
from tests.unit.spec_decode.verification.joint_law import (
    LOGITS,
    NUM_CONTEXTS,
    VOCAB,
    Params,
    chi_square,
    critical_value,
    decode,
    exact_law,
)

pytestmark = pytest.mark.slow

NUM_DRAWS = 200_000
PARAMS = {
    "plain": Params(),
    "cool-nucleus": Params(temperature=0.7, top_p=0.85),
    # Penalties make what a position may say depend on the tokens, and the drafts, before it.
    "penalties": Params(temperature=1.3, repetition_penalty=1.6, presence_penalty=0.6, frequency_penalty=0.9),
}
DRAFTERS = {
    "none": None,
    "most-likely": LOGITS.argmax(axis=1),
    "least-likely": LOGITS.argmin(axis=1),
    "by-history": 5 * np.arange(NUM_CONTEXTS) // 3 % VOCAB,
}


@pytest.fixture(scope="module")
def laws() -> dict[str, np.ndarray]:
    return {name: exact_law(params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_target_match_preserves_the_joint_law(name: str, drafter: str, laws: dict[str, np.ndarray]) -> None:
    tokens = decode(PARAMS[name], VerifyRule("target_match"), DRAFTERS[drafter], NUM_DRAWS)
    statistic, num_degrees = chi_square(tokens, laws[name])
    assert statistic < critical_value(num_degrees)


@pytest.mark.parametrize("drafter", ["most-likely", "by-history"])
@pytest.mark.parametrize("name", PARAMS)
def test_topp_fails_the_same_test_by_far(name: str, drafter: str, laws: dict[str, np.ndarray]) -> None:
    tokens = decode(PARAMS[name], VerifyRule("topp"), DRAFTERS[drafter], NUM_DRAWS)
    statistic, num_degrees = chi_square(tokens, laws[name])
    assert statistic > 100 * critical_value(num_degrees)


def test_the_exact_laws_are_laws_and_differ(laws: dict[str, np.ndarray]) -> None:
    for law in laws.values():
        assert law.sum() == pytest.approx(1.0)
    assert np.abs(laws["plain"] - laws["penalties"]).sum() > 0.1
    assert (laws["cool-nucleus"] == 0.0).any()


@pytest.mark.parametrize("num_degrees", [20, 50, 100, 214])
def test_critical_values_are_exceeded_as_rarely_as_they_say(num_degrees: int) -> None:
    # For an even number of degrees chi-square has an exact tail: that of fewer than half of them events of a Poisson
    # process of half the value.
    mean = critical_value(num_degrees) / 2
    tail = sum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(num_degrees // 2))
    assert tail == pytest.approx(1e-3, rel=0.05)
