"""Rank 0's side of a step on several ranks: it tells the others what to run, and whether all have run it.

An *attempt* is a run of all ranks together: the model over some rows, or the draft layers. It succeeds when every rank
reports success. Else it fails on all of them, and rank 0 tries parts of the rows, as a single process does. Knows no
sockets and no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.errors import FdsdError, Unavailable, device_lost_as_error
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import EMPTY_I32, I32, DraftTokens, RequestId, SchedulerOutput
from fastdeploy_sd.worker.ranks.commands import (
    Attempt,
    BeginDrafts,
    Command,
    DraftOutcome,
    DraftRows,
    ForgetDrafts,
    RankFailure,
    TakePlan,
)

MakeAttempt = Callable[[int], Attempt]


class GroupEnded(BaseException):
    """A rank has ended, so nothing can be computed. It is no Exception, so that no handler takes it for a row's fault;
    the executor raises `error` instead."""

    def __init__(self, error: FdsdError) -> None:
        super().__init__(error.message)
        self.error = error


class group_ended_as_error(device_lost_as_error):  # noqa: N801 (see there)
    """As that, and raise a GroupEnded of the body as its `error`."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, GroupEnded):
            raise error.error from None
        super().__exit__(kind, error, traceback)


class RankError(Exception):
    """Another rank could not run an attempt."""


class LostExpertsError(Exception):
    """An attempt could not be run, here or on another rank, without experts that a rank has not run."""


class Collectives(Protocol):
    """The collectives of ranks inside a pass; see parallel.communicator."""

    def begin(self, attempt: int) -> None:
        """Start an attempt: ranks that stopped at different ops of the last one are synchronized again."""
        ...

    def fail(self) -> None:
        """Make the other ranks' ops of this attempt fail."""
        ...


class OtherRanks(Protocol):
    """Rank 0's interface to the other ranks. Every call may raise GroupEnded."""

    def post(self, command: Command) -> None:
        """Queue a command that cannot fail and needs no answer, for the next `send`. It is copied at once."""
        ...

    def flush(self) -> None:
        """Send what is queued, now."""
        ...

    def send(self, attempt: Attempt) -> None:
        """Tell them all to run an attempt, now."""
        ...

    def collect(self) -> Mapping[int, RankFailure]:
        """Wait until all have run it; return the ranks that failed, and why."""
        ...

    def share_experts(self, experts: ExpertService) -> None:
        """End its waits when a rank of this group has ended. Who waits for another engine's experts does not hang."""
        ...


class RankCoordinator(Protocol):
    """The part of a ModelRunner that involves other ranks."""

    def take_plan(self, plan: SchedulerOutput, refused_ids: Sequence[RequestId]) -> None:
        """Send a step's plan to the other ranks."""
        ...

    def post(self, command: Command) -> None: ...

    def attempt(self, make: MakeAttempt) -> AbstractContextManager[object]:
        """Return a context in which this rank runs an attempt; `make` gets its number.

        Its end raises RankError if another rank failed.
        """
        ...


class SingleRank:
    """A RankCoordinator without other ranks."""

    def take_plan(self, plan: SchedulerOutput, refused_ids: Sequence[RequestId]) -> None:
        """There are no others."""

    def post(self, command: Command) -> None:
        """There are no others."""

    def attempt(self, make: MakeAttempt) -> AbstractContextManager[object]:
        """Run it on this rank only."""
        return nullcontext()


class ExpertRanks:
    """A RankCoordinator where experts are spread: without those of a lost rank no part of the rows can run."""

    def __init__(self, ranks: RankCoordinator, experts: ExpertService) -> None:
        self._ranks, self._experts = ranks, experts
        self.take_plan, self.post = ranks.take_plan, ranks.post

    @contextmanager
    def attempt(self, make: MakeAttempt) -> Iterator[object]:
        """See RankCoordinator; raises GroupEnded where a rank has not run its experts."""
        try:
            with self._ranks.attempt(make) as running:
                yield running
        except (ValueError, RankError, LostExpertsError) as error:
            if isinstance(error, LostExpertsError) or self._experts.has_lost_experts:
                raise GroupEnded(Unavailable(f"experts of another engine are lost: {error}")) from error
            raise


class GroupCoordinator:
    """A RankCoordinator of other ranks."""

    def __init__(self, others: OtherRanks, collectives: Collectives) -> None:
        self._others, self._collectives = others, collectives
        self._num_attempts = 0
        self._running: _RunningAttempt | None = None

    def take_plan(self, plan: SchedulerOutput, refused_ids: Sequence[RequestId]) -> None:
        if plan.draft.logprobs is not None:
            plan = replace(plan, draft=replace(plan.draft, logprobs=None))
        self._others.post(TakePlan(plan, tuple(refused_ids)))

    def post(self, command: Command) -> None:
        self._others.post(command)

    def attempt(self, make: MakeAttempt) -> _RunningAttempt:
        self._num_attempts += 1
        self._running = _RunningAttempt(self._others, self._collectives, self._num_attempts, make)
        return self._running

    def agree(self) -> None:
        """End the running attempt early, before this rank's state changes; the rest of its context cannot fail.

        Raises RankError: another rank has failed.
        """
        assert self._running is not None, "no attempt runs"
        self._running.end(has_failed=False)

    def over_ranks(self, name: str, method: Proposer) -> Proposer:
        """Return the method, which runs a model, so that it runs on every rank."""
        return _SharedProposer(name, method, self)


class _RunningAttempt:
    """See RankCoordinator.attempt."""

    def __init__(self, others: OtherRanks, collectives: Collectives, number: int, make: MakeAttempt) -> None:
        self._others, self._collectives = others, collectives
        self._number, self._command = number, make(number)
        self._has_ended = False

    def __enter__(self) -> Self:
        self._others.send(self._command)
        try:
            self._collectives.begin(self._number)
        except ValueError:  # aborted: a rank has ended, which `end` reports
            self.end(has_failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_ended or not (error is None or isinstance(error, Exception)):
            return
        if error is None:
            self.end(has_failed=False)
            return
        self._collectives.fail()
        self.end(has_failed=True)

    def end(self, *, has_failed: bool) -> None:
        """Wait for all to end; raise RankError or LostExpertsError if another one failed, unless this rank has an error
        of its own.
        """
        self._has_ended = True
        failed = self._others.collect()
        if isinstance(self._command, DraftRows):
            self._others.post(DraftOutcome(not (has_failed or failed)))
        if failed and not has_failed:
            is_lost = any(failure.has_lost_experts for failure in failed.values())
            text = "; ".join(f"rank {rank}: {failed[rank].reason}" for rank in sorted(failed))
            raise LostExpertsError(text) if is_lost else RankError(text)


class _SharedProposer(Proposer):
    """A method that runs a model on every rank; all ranks get the same drafts, and this rank returns them."""

    def __init__(self, name: str, method: Proposer, ranks: GroupCoordinator) -> None:
        self._name, self._method, self._ranks = name, method, ranks

    @property
    def num_lookahead_slots(self) -> int:
        return self._method.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        # What only this rank drafts from stays here.
        self._ranks.post(BeginDrafts(self._name, tuple(replace(r, prediction_token_ids=EMPTY_I32) for r in requests)))
        self._method.begin(requests)

    def propose(self, x: ProposeInput) -> DraftTokens:
        limits = x.max_draft_len
        if x.prefix is not None:  # a row with a prefix gets no further drafts
            limits = np.where(np.diff(x.prefix.cu_num_draft) == 0, limits, 0).astype(np.int32)
        least = None if x.probabilities is None else x.probabilities.min_survival
        with self._ranks.attempt(lambda number: DraftRows(number, self._name, x.table_rows, limits, least)):
            return self._method.propose(x)

    def forget(self, table_rows: I32) -> None:
        self._ranks.post(ForgetDrafts(self._name, table_rows))
        self._method.forget(table_rows)

    def close(self) -> None:
        self._method.close()
