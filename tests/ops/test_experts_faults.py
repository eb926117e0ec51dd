"""Ranks that share experts, one of which stops, ends, or starts again: the same bytes, or an error that names it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.device.expert_service import ExpertService, expert_segment
from tests.ops import expert_rank_process
from tests.ops.backends import threads
from tests.ops.expert_model import linear_placement, ranks_of, shape_of
from tests.ops.ranks import TIMEOUT_S, RankProcess

pytestmark = pytest.mark.slow

SIZE = 3


class Group:
    """Ranks that are processes over one segment, and can be started again."""

    def __init__(self, fd: int, timeout_s: float) -> None:
        self._fd, self._timeout_s = fd, timeout_s
        self.ranks = [self._started(rank) for rank in range(SIZE)]

    def _started(self, rank: int) -> RankProcess:
        return RankProcess(self._fd, rank, SIZE, self._timeout_s, "expert_rank_process")

    def start_again(self, rank: int) -> None:
        """Kill a rank and start it; it may still be loading."""
        self.ranks[rank].end()
        self.ranks[rank] = self._started(rank)

    @contextlib.contextmanager
    def loading(self, rank: int) -> Iterator[ExpertService]:
        """Open a rank that was killed in this process; it does not serve."""
        layers, placement = expert_rank_process.layers(), expert_rank_process.placement_of(SIZE)
        shape = shape_of(layers, placement, expert_rank_process.MAX_TOKENS)
        with contextlib.closing(ExpertService.open(self._fd, rank, shape, self._timeout_s)) as service:
            yield service

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


@contextlib.contextmanager
def group_of(timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    fd = expert_segment()
    group = Group(fd, timeout_s)
    try:
        assert [rank.reply() for rank in group.ranks] == [1] * SIZE
        assert [rank.ask("meet") for rank in group.ranks] == ["ready"] * SIZE
        yield group
    finally:
        os.close(fd)
        group.end()


def in_one_process(seed: int, count: int, times: int) -> str:
    """What a rank alone computes, which test_experts.py compares with moe_ffn."""
    layers = expert_rank_process.layers()
    max_tokens = expert_rank_process.MAX_TOKENS
    with threads(1), ranks_of(layers, linear_placement(8, 1), np.float32, max_tokens) as ranks:
        return expert_rank_process.run_passes(ranks.services[0], layers, seed, count, times)


@pytest.mark.parametrize("moves", [False, True])
def test_a_rank_that_is_killed_anywhere_and_starts_again_costs_no_byte(moves: bool) -> None:
    """Killed before it is asked, while it runs experts for others, and in a pass of its own; also where experts move
    all the time.
    """
    orders = [{"seed": 100 * r, "count": 60 + r, "times": 6} for r in range(SIZE)]
    want = [in_one_process(**order) for order in orders]
    with group_of() as group:
        if moves:
            assert [rank.ask("follow") for rank in group.ranks] == [None] * SIZE
            group.ranks[0].ask("shuffle")
        for i, after_s in enumerate((0.004, 0.023) if moves else (0.0, 0.004, 0.011, 0.023)):
            victim = group.ranks[1]
            if i % 2 == 1:
                victim.send("run", **orders[1])
            group.ranks[0].send("run", **orders[0])
            group.ranks[2].send("run", **orders[2])
            time.sleep(after_s)
            group.start_again(1)
            assert [group.ranks[r].reply() for r in (0, 2)] == [want[0], want[2]], f"killed after {after_s} s"
            assert group.ranks[1].reply() == i + 2  # its incarnation
            if moves:
                group.ranks[1].ask("follow")
            assert group.ranks[1].ask("run", **orders[1]) == want[1]
        if moves:
            assert group.ranks[0].ask("ordered") > 0


def test_a_rank_that_does_not_come_back_is_named_in_time() -> None:
    order = {"seed": 5, "count": 7, "times": 1}
    with group_of(timeout_s=0.4) as group:
        group.ranks[1].end()
        assert group.ranks[0].ask("states") == ["serving", "loading", "serving"]
        begin = time.monotonic()
        text = group.ranks[0].ask("run", **order)
        assert text == "error: combine_experts: rank 1 did not run its experts in time"
        assert group.ranks[0].ask("lost") is True
        # The rows of the failed pass are still asked for.
        text = group.ranks[0].ask("run", **order)
        assert text == "error: dispatch_experts: rank 1 did not run its experts in time"
        group.ranks[0].ask("gone", rank=1)
        text = group.ranks[0].ask("run", **order)
        assert text == "error: dispatch_experts: rank 1 has ended, and no other has its experts"
        assert time.monotonic() - begin < TIMEOUT_S
        group.start_again(1)
        assert group.ranks[1].reply() == 2
        assert group.ranks[0].ask_in_time("run", **order) == in_one_process(**order)
        assert group.ranks[0].ask("lost") is False


def test_a_rank_that_loads_for_longer_than_the_timeout_is_waited_for() -> None:
    order = {"seed": 5, "count": 7, "times": 1}
    with group_of(timeout_s=0.2) as group:
        group.ranks[1].end()
        with group.loading(1) as service:
            group.ranks[0].send("run", **order)
            end = time.monotonic() + TIMEOUT_S
            while (awaited := np.argwhere(service.awaited()).tolist()) != [[0, 1]]:
                assert time.monotonic() < end, awaited
                time.sleep(0.01)
            time.sleep(0.6)
            assert np.argwhere(service.awaited()).tolist() == [[0, 1]]
        group.start_again(1)
        want, got = in_one_process(**order), group.ranks[0].reply()
        assert (group.ranks[0].ask_in_time("run", **order) if got.endswith(" in time") else got) == want


def test_a_rank_that_drains_waits_for_none_that_is_lost() -> None:
    """Whether it waits already or not; a rank that is there is waited for."""
    order = {"seed": 5, "count": 7, "times": 1}
    with group_of() as group:
        group.ranks[2].ask("drain")
        assert group.ranks[2].ask("run", **order) == in_one_process(**order)
        group.ranks[1].end()
        text = "error: combine_experts: rank 1 is lost, and a drain does not wait for it"
        assert group.ranks[2].ask("run", **order) == text
        assert group.ranks[2].ask("lost") is True


def test_a_rank_has_one_process() -> None:
    text = "rank: expected one that no other process is"
    with group_of() as group, pytest.raises(ValueError, match=text), group.loading(1):
        pass


def test_a_rank_that_stands_still_for_a_second_costs_no_byte() -> None:
    orders = [{"seed": 100 * r, "count": 60 + r, "times": 10} for r in range(SIZE)]
    with group_of() as group:
        for rank, order in zip(group.ranks, orders, strict=True):
            rank.send("run", **order)
        time.sleep(0.01)
        os.kill(group.ranks[2].process.pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(group.ranks[2].process.pid, signal.SIGCONT)
        assert [rank.reply() for rank in group.ranks] == [in_one_process(**order) for order in orders]


def test_a_rank_that_comes_after_its_time_touches_nothing_of_the_next_pass() -> None:
    """It writes what it was running when it stood still."""
    failed, order = {"seed": 7, "count": 250, "times": 1000}, {"seed": 8, "count": 61, "times": 3}
    want = in_one_process(**order)
    with group_of(timeout_s=0.15) as group:
        for i in range(2):
            group.ranks[0].send("run", **failed)
            time.sleep(0.02 + 0.005 * i)
            os.kill(group.ranks[1].process.pid, signal.SIGSTOP)
            assert group.ranks[0].reply().endswith(" did not run its experts in time")
            os.kill(group.ranks[1].process.pid, signal.SIGCONT)
            assert group.ranks[0].ask_in_time("run", **order) == want
