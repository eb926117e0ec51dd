"""A fixed budget of the mutation fuzzer, and that it sees what it looks for."""

from __future__ import annotations

import pytest

from tests.fuzz.checkpoints import Worker, run_starts

pytestmark = pytest.mark.slow

COUNT = 80


def test_a_damaged_checkpoint_is_served_or_refused_in_one_line() -> None:
    starts = list(run_starts(f"ci/{number}" for number in range(COUNT)))
    assert not [start for start in starts if start.outcome == "broken"]
    assert {start.outcome for start in starts} == {"served", "refused"}


def test_a_start_is_a_function_of_its_seed() -> None:
    with Worker() as first, Worker() as second:
        assert first.run("ci/3") == second.run("ci/3")
