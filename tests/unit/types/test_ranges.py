"""How dimensions are cut for the fixed tree of sums."""

from __future__ import annotations

import itertools

import pytest

from fastdeploy_sd.types.ranges import COUNTS, SliceRule, halved
from fastdeploy_sd.types.shard import Shard

SIZES_AND_UNITS = list(itertools.product((1, 4, 7, 64, 100, 320, 896, 1024, 11008), (1, 3, 16, 64, 128)))


def test_the_left_half_gets_the_smaller_share() -> None:
    assert halved(896, 4, 128) == (range(128), range(128, 384), range(384, 640), range(640, 896))
    assert halved(896, 2, 128) == (range(384), range(384, 896))
    assert halved(100, 2, 64) == (range(64), range(64, 100))
    assert halved(96, 4, 24) == (range(24), range(24, 48), range(48, 72), range(72, 96))
    assert halved(3, 4, 1) == (range(0), range(1), range(1, 2), range(2, 3))


@pytest.mark.parametrize(("size", "unit"), SIZES_AND_UNITS)
def test_ranges_are_neighbours_and_cover_the_whole(size: int, unit: int) -> None:
    for count in COUNTS:
        ranges = SliceRule(count, unit).ranges(size)
        assert len(ranges) == count
        assert [i for part in ranges for i in part] == list(range(size))
        assert all(part.start % unit == 0 for part in ranges if len(part))


@pytest.mark.parametrize(("size", "unit"), SIZES_AND_UNITS)
def test_what_a_rank_has_is_cut_by_the_same_rule(size: int, unit: int) -> None:
    """So a rank forms whole subtrees of the sum."""
    for count, num_ranks in ((4, 2), (4, 4), (2, 2), (4, 1)):
        rule, found = SliceRule(count, unit), []
        for part in halved(size, num_ranks, unit):
            found += [(part.start + s.start, part.start + s.stop) for s in rule.of_rank(num_ranks).ranges(len(part))]
        assert found == [(s.start, s.stop) for s in rule.ranges(size)]


@pytest.mark.parametrize(("count", "unit"), [(3, 1), (0, 1), (8, 1), (4, 0)])
def test_other_rules_are_refused(count: int, unit: int) -> None:
    with pytest.raises(ValueError, match=r"slices: expected a count of 1, 2 or 4 and a unit of 1 or more, got"):
        SliceRule(count, unit)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_one_of_its_group(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank: expected 0..{size - 1}, got {rank}"):
        Shard(rank, size)
