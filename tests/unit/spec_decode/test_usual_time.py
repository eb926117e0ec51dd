"""Times around a step are lower quartiles by load."""

from __future__ import annotations

from fastdeploy_sd.spec_decode.auto.usual_time import UsualTime


def test_one_long_time_changes_nothing_and_many_do() -> None:
    usual = UsualTime()
    assert usual.seconds(1) == 0.0
    for i in range(20):
        usual.observe(1, 50.0 if i == 13 else 1.0)
    assert usual.seconds(1) == 1.0
    for _ in range(20):
        usual.observe(1, 3.0)
    assert usual.seconds(1) == 3.0


def test_loads_are_apart_and_one_that_was_not_seen_takes_the_latest() -> None:
    usual = UsualTime()
    usual.observe(1, 1.0)
    usual.observe(8, 4.0)
    assert (usual.seconds(1), usual.seconds(8), usual.seconds(15)) == (1.0, 4.0, 4.0)
    assert usual.seconds(64) == 4.0
