"""Ranks that get nowhere are killed, unless they rightly wait for others."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from fastdeploy_sd.distributed.watch import RankWatch

TIMEOUT_S = 0.2
WAIT_S = 60.0


class IdleRank:
    """A rank that computes nothing, and ends when it is killed."""

    def __init__(self) -> None:
        self.end, self.is_killed = os.eventfd(0), False

    def open_end(self) -> int | None:
        return os.dup(self.end)

    def describe_end(self) -> str:
        return "ended"

    def cpu_s(self) -> float:
        return 0.0

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        self.is_killed = True
        os.eventfd_write(self.end, 1)


@pytest.mark.slow
def test_ranks_that_wait_for_others_than_these_ranks_do_not_hang() -> None:
    rank, waits, ends = IdleRank(), [True], list[str]()
    with closing(RankWatch({1: rank}, TIMEOUT_S, ends.append, lambda: waits[0])) as watch:
        watch.expect(frozenset({1}), is_idle_otherwise=True)
        time.sleep(4 * TIMEOUT_S)
        assert not rank.is_killed
        waits[0] = False
        failure = watch.failure(WAIT_S)
    assert failure is not None
    assert failure.startswith("rank 1 has got nowhere for")
    assert ends == [failure]
    os.close(rank.end)


@pytest.mark.slow
def test_ranks_of_which_nothing_is_awaited_may_idle() -> None:
    rank = IdleRank()
    with closing(RankWatch({1: rank}, TIMEOUT_S, lambda how: None)) as watch:
        assert watch.failure(4 * TIMEOUT_S) is None
    assert not rank.is_killed
    os.close(rank.end)
