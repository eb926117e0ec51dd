"""A step that lacks experts ends the engine; any other failure is of the step's rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_sd.worker.ranks.commands import RankFailure, RunRows
from fastdeploy_sd.worker.ranks.coordinator import (
    ExpertRanks,
    GroupCoordinator,
    GroupEnded,
    LostExpertsError,
    RankError,
)
from fastdeploy_sd.worker.ranks.rank_group import NoCollectives
from fastdeploy_sd.worker.ranks.rank_worker import RankWorker


class Others:
    """Other ranks, which fail as they are told."""

    def __init__(self, failures: Mapping[int, RankFailure]) -> None:
        self._failures = failures

    def post(self, command: object) -> None: ...

    def flush(self) -> None: ...

    def send(self, attempt: object) -> None: ...

    def collect(self) -> Mapping[int, RankFailure]:
        return self._failures

    def share_experts(self, experts: object) -> None: ...


def ranks(has_lost_experts: bool, failures: Mapping[int, RankFailure] | None = None) -> ExpertRanks:
    service: Any = SimpleNamespace(has_lost_experts=has_lost_experts)
    return ExpertRanks(GroupCoordinator(Others(failures or {}), NoCollectives()), service)


def test_experts_that_this_rank_lacks_end_the_group() -> None:
    with pytest.raises(GroupEnded) as end, ranks(True).attempt(RunRows):
        raise ValueError("combine_experts: rank 3 did not run its experts in time")
    assert end.value.error.message == (
        "experts of another engine are lost: combine_experts: rank 3 did not run its experts in time"
    )


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(RankFailure("of any text", True), GroupEnded), (RankFailure("rank 3 lost its experts"), RankError)],
)
def test_those_that_another_rank_lacks_do_too(failure: RankFailure, expected: type[BaseException]) -> None:
    with pytest.raises(expected), ranks(False, {1: failure}).attempt(RunRows):
        pass


def test_another_error_goes_up() -> None:
    with pytest.raises(ValueError, match="rank 2 has a row of experts"), ranks(False).attempt(RunRows):
        raise ValueError("rank 2 has a row of experts that it refuses")


@pytest.mark.parametrize(("has_lost", "expected"), [(True, LostExpertsError), (False, ValueError)])
def test_another_rank_says_which_it_is(has_lost: bool, expected: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise ValueError("an op failed")

    worker = RankWorker.__new__(RankWorker)
    worker._experts = SimpleNamespace(has_lost_experts=has_lost)  # type: ignore[assignment]
    worker._run = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(expected, match="an op failed"):
        worker.run(RunRows(1))
