"""Which instance takes a request."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.cluster.placement import PREFERENCE, choose


def load(num_requests: int, capacity: int = 8) -> InstanceLoad:
    return InstanceLoad(True, num_requests, 0, capacity)


def test_nobody_there() -> None:
    assert choose({}, preferred=["a"]) is None


def test_the_emptiest_by_share_takes_it() -> None:
    assert choose({"small": load(3, 4), "large": load(8, 32)}) == "large"
    assert choose({"a": InstanceLoad(True, 1, 5, 8), "b": InstanceLoad(True, 5, 0, 8)}) == "b"


def test_equals_take_turns() -> None:
    rng = random.Random(1)
    chosen = {choose({"a": load(1), "b": load(1), "c": load(2)}, rng=rng) for _ in range(50)}
    assert chosen == {"a", "b"}


@pytest.mark.parametrize(("num_requests", "want"), [(2, "mine"), (3, "other")])
def test_a_preferred_one_may_be_a_little_fuller(num_requests: int, want: str) -> None:
    assert PREFERENCE * 8 == 2
    assert choose({"mine": load(num_requests), "other": load(0)}, preferred=["gone", "mine"]) == want
