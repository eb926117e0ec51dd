"""A fixed budget of the mutation fuzzer, and that it sees what it looks for."""

from __future__ import annotations

import pytest

from tests.fuzz.checkpoints import Worker, run_starts

pytestmark = pytest.mark.slow

COUNT = 28


def test_a_damaged_checkpoint_is_served_or_refused_in_one_line() -> None:
    """Also that a start is a function of its seed: another process sees the same."""
    starts = list(run_starts(f"ci/{number}" for number in range(COUNT)))
    assert not [start for start in starts if start.outcome == "broken"]
    assert {start.outcome for start in starts} == {"served", "refused"}
    with Worker() as other:
        assert starts[5].outcome == "served"
        assert other.run(starts[5].seed) == starts[5]
