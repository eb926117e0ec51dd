"""What steps take against what was measured: hoped for where nothing was seen, and known after a few."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.auto.row_corrections import RowCorrections

NUM_ROWS = 200


def run(corrections: RowCorrections, num_rows: int, truth: float, num_steps: int = 1) -> None:
    """Steps take `truth` times what was measured."""
    for _ in range(num_steps):
        believed = corrections.speed * corrections.by_rows().item(num_rows)
        corrections.observe(num_rows, min(max(truth / believed, 0.8), 1.25))


def over_plain(corrections: RowCorrections, num_rows: int) -> float:
    """What such steps are expected to take over those of 16 rows, each over what was measured."""
    found = corrections.by_rows()
    return found.item(num_rows) / found.item(16)


def test_what_was_measured_holds_before_a_step_was_seen() -> None:
    assert RowCorrections(NUM_ROWS).by_rows().tolist() == [1.0] * (NUM_ROWS + 1)


@pytest.mark.parametrize("speed", [0.6, 1.0, 1.7])
def test_a_machine_of_another_speed_makes_rows_never_seen_neither_dearer_nor_cheaper(speed: float) -> None:
    corrections = RowCorrections(NUM_ROWS)
    run(corrections, 16, speed, 100)
    assert corrections.speed == pytest.approx(speed, rel=0.01)
    assert over_plain(corrections, 16) == 1.0
    assert over_plain(corrections, 4) == pytest.approx(1.0, abs=0.01)
    # More rows are hoped to take a little less, one and all.
    assert over_plain(corrections, 64) == pytest.approx(0.86, abs=0.015)
    assert over_plain(corrections, 136) == pytest.approx(over_plain(corrections, 64), abs=0.001)


@pytest.mark.parametrize("truth", [0.8, 1.0, 1.2])
def test_a_few_steps_tell_what_so_many_rows_take(truth: float) -> None:
    corrections = RowCorrections(NUM_ROWS)
    run(corrections, 16, 1.0, 30)
    for _ in range(10):
        run(corrections, 128, truth)
        run(corrections, 16, 1.0)
    assert over_plain(corrections, 128) == pytest.approx(truth, rel=0.1)
    assert min(truth, 1.0) < over_plain(corrections, 64) + 0.02 < max(truth, 1.0) + 0.04, "between those seen"


def test_one_interrupted_step_says_little_where_many_were_seen_and_something_where_none_was() -> None:
    corrections = RowCorrections(NUM_ROWS)
    for _ in range(50):
        run(corrections, 16, 1.0)
        run(corrections, 64, 1.0)
    run(corrections, 64, 9.0)
    assert over_plain(corrections, 64) == pytest.approx(1.0, abs=0.02)
    run(corrections, 136, 9.0)
    assert 0.85 < over_plain(corrections, 136) < 1.1


def test_what_was_found_out_is_forgotten_and_hoped_for_again() -> None:
    corrections = RowCorrections(NUM_ROWS)
    run(corrections, 16, 1.0, 30)
    for _ in range(12):
        run(corrections, 128, 1.3)
        run(corrections, 16, 1.0)
    assert over_plain(corrections, 128) > 1.1
    run(corrections, 16, 1.0, 300)
    assert over_plain(corrections, 128) > 1.0
    run(corrections, 16, 1.0, 3000)
    assert over_plain(corrections, 128) == pytest.approx(0.86, abs=0.015)


def test_a_step_says_whether_it_was_of_a_rare_kind() -> None:
    corrections = RowCorrections(NUM_ROWS)
    assert corrections.observe(16, 1.0)
    assert not [corrections.observe(16, 1.0) for _ in range(20)][-1]
    assert corrections.observe(128, 1.0)
    assert np.isfinite(corrections.by_rows()).all()
    assert corrections.observe(NUM_ROWS, 1.0), "the last row has no octave above it"
