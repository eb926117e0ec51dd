"""The process of a rank other than 0, from its first line to its exit status."""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fastdeploy_sd.config import Config, from_json
from fastdeploy_sd.device import library
from fastdeploy_sd.distributed.link import LinkClosedError, RankLink
from fastdeploy_sd.distributed.messages import (
    AllGathered,
    AllReducedMin,
    AttemptDone,
    Contribution,
    Loaded,
    Measure,
    Measurement,
    Order,
    RankFailed,
    RankReady,
    Reply,
    StopRank,
    decode,
    encode,
    frame_of,
)
from fastdeploy_sd.distributed.starting import expert_place, open_communicator
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import DeviceLost, FdsdError, InternalError
from fastdeploy_sd.process.child import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    configure_logging,
    end_with_parent,
    read_start,
)
from fastdeploy_sd.process.heap import settle_heap
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.worker.ranks.commands import (
    Attempt,
    BeginDrafts,
    CompactPaths,
    DraftOutcome,
    DraftRows,
    ForgetDrafts,
    RankFailure,
    ReadAdapter,
    RunRows,
    TakeOutput,
    TakePlan,
)
from fastdeploy_sd.worker.ranks.coordinator import LostExpertsError, RankError
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from fastdeploy_sd.worker.ranks.rank_worker import RankWorker

logger = logging.getLogger(__name__)


OrderT = TypeVar("OrderT", AllGathered, Measure, AllReducedMin, DraftOutcome)
RankWorkerFactory = Callable[[Config, RankGroup], "RankWorker"]
DEFAULT_RANK_WORKER = "fastdeploy_sd.worker.executor:create_rank_worker"


def main() -> int:
    """Entry point of the process. It ends as soon as rank 0 has, or shuts its link."""
    start = read_start()
    end_with_parent()
    rank, size = int(start["rank"]), int(start["size"])
    link = RankLink(socket.socket(fileno=int(start["link"])))
    communicator, exchange = open_communicator(start)
    session = _Session(link)
    try:
        config = from_json(start["config"])
        parallel = config.parallel
        number = parallel.neighbours.engines_before + (parallel.local_data_parallel_id or 0)
        engine = f"engine-{number}-" if max(parallel.data_parallel_size, parallel.engines_on_host) > 1 else ""
        configure_logging(f"{engine}rank-{rank}")
        library.set_isa(start["isa"])  # another level has other bytes
        module, name = start["rank_worker"].split(":")
        create: RankWorkerFactory = getattr(importlib.import_module(module), name)
        expert_file = int(start["expert_file"]) if "expert_file" in start else None
        group = RankGroup(
            rank,
            size,
            int(start["num_threads"]),
            communicator,
            agree=session.agree,
            smallest=session.smallest,
            exchange=session.exchange,
            kv_files={rank: int(start["kv_file"])} if "kv_file" in start else {},
            expert_place=expert_place(config.parallel, rank, expert_file),
        )
        rank_worker = create(config, group)
        settle_heap()
        session.answer(RankReady())
        if exchange is not None:
            exchange.connect()
        session.serve(rank_worker)
        return EXIT_OK
    except LinkClosedError:
        return EXIT_FAILED
    except FdsdError as error:
        session.fail(error)
        return EXIT_CONFIG
    except (Exception, DeviceLost) as error:
        logger.exception("rank %d failed", rank)
        session.fail(InternalError(f"rank {rank} failed: {error!r}"))
        return EXIT_FAILED


class _Session:
    """The conversation with rank 0."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._orders: deque[Order] = deque()
        self._has_answered = False

    def answer(self, reply: Reply) -> None:
        self._link.send(frame_of([encode(reply)]))

    def fail(self, error: FdsdError) -> None:
        """Tell rank 0 why this process ends, if the link is still open."""
        with contextlib.suppress(LinkClosedError):
            self.answer(RankFailed(WireError.of(error)))

    def exchange(self, data: bytes) -> Sequence[bytes]:
        self.answer(Contribution(data))
        return self._expect(AllGathered).data

    def smallest(self, measure: Callable[[], int]) -> int:
        self.answer(Loaded())
        self._expect(Measure)
        self.answer(Measurement(measure()))
        return self._expect(AllReducedMin).value

    def agree(self) -> None:
        """See RankGroup.agree; raises RankError where another rank has failed."""
        self._end_attempt(None)
        if not self._expect(DraftOutcome).has_succeeded:
            raise RankError("another rank could not run the draft layers")

    def serve(self, rank_worker: RankWorker) -> None:
        """Follow rank 0's orders until StopRank; raises LinkClosedError where rank 0 is gone."""
        while True:
            order = self._next()
            match order:
                case RunRows() | CompactPaths() | DraftRows():
                    self._run(rank_worker, order)
                case ReadAdapter() | TakePlan() | TakeOutput() | BeginDrafts() | ForgetDrafts():
                    rank_worker.take(order)
                case StopRank(leave_s):
                    rank_worker.leave(leave_s)
                    return
                case _:
                    raise ProtocolError(f"expected an order between two attempts, got {type(order).__name__}")

    def _run(self, rank_worker: RankWorker, attempt: Attempt) -> None:
        self._has_answered = False
        failure: RankFailure | None = None
        try:
            rank_worker.collectives.begin(attempt.attempt)
            rank_worker.run(attempt)
        except LinkClosedError:
            raise
        except Exception as error:
            if self._has_answered:
                if not isinstance(error, RankError):
                    raise  # the others assume that this rank has run the attempt
            else:
                logger.exception("attempt %d failed", attempt.attempt)
                rank_worker.collectives.fail()
                rank_worker.drain()
                failure = RankFailure(repr(error), isinstance(error, LostExpertsError))
        if not self._has_answered:
            self._end_attempt(failure)
            if isinstance(attempt, DraftRows):
                self._expect(DraftOutcome)

    def _end_attempt(self, failure: RankFailure | None) -> None:
        self._has_answered = True
        self.answer(AttemptDone(failure))

    def _expect(self, kind: type[OrderT]) -> OrderT:
        order = self._next()
        assert isinstance(order, kind), f"expected {kind.__name__}, got {order}"
        return order

    def _next(self) -> Order:
        while not self._orders:
            self._orders.extend(decode(self._link.receive()))  # type: ignore[arg-type]  # replies come from no one
        return self._orders.popleft()
