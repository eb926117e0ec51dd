"""run_in_parts finds exactly the rows that fail, in few runs."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.spec_decode.bisection import run_in_parts


class Rows:
    """Adds rows up, and fails on some."""

    def __init__(self, culprits: set[int], max_rows: int = 1 << 20) -> None:
        self.culprits, self.max_rows, self.num_runs = culprits, max_rows, 0

    def __call__(self, begin: int, end: int) -> int:
        self.num_runs += 1
        if end - begin > self.max_rows or not self.culprits.isdisjoint(range(begin, end)):
            raise ValueError(f"{begin}..{end}")
        return sum(range(begin, end))


def test_where_the_device_is_lost_no_part_is_tried() -> None:
    num_runs = 0

    def lose(begin: int, end: int) -> int:
        nonlocal num_runs
        num_runs += 1
        raise DeviceLost("a kernel went wrong")

    with pytest.raises(DeviceLost):
        run_in_parts(lose, 0, 8)
    assert num_runs == 1


def test_nothing_is_run_in_one_part() -> None:
    rows = Rows(set())
    assert run_in_parts(rows, 3, 3) == []
    [part] = run_in_parts(rows, 3, 8)
    assert (part.begin, part.end, part.result, part.error, rows.num_runs) == (3, 8, 25, None, 1)


@pytest.mark.parametrize("seed", range(50))
def test_exactly_the_culprits_fail_and_every_row_is_in_one_part(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 70)
    rows = Rows({i for i in range(count) if rng.random() < 0.1})
    parts = run_in_parts(rows, 0, count)
    assert [i for part in parts for i in range(part.begin, part.end)] == list(range(count))
    assert {part.begin for part in parts if part.error is not None} == rows.culprits
    assert all(part.end - part.begin == 1 for part in parts if part.error is not None)
    assert all(part.result == sum(range(part.begin, part.end)) for part in parts if part.error is None)
    assert rows.num_runs <= 1 + 2 * max(len(rows.culprits), 1) * count.bit_length()


def test_rows_that_fail_only_together_all_come_out() -> None:
    rows = Rows(set(), max_rows=3)
    assert all(part.error is None for part in run_in_parts(rows, 0, 17))


def test_what_is_no_exception_of_a_row_goes_through() -> None:
    def interrupted(begin: int, end: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(interrupted, 0, 4)
