"""Rank 0's control of the other ranks: their processes, the orders to them, and their replies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.distributed.exchange import ExchangeError
from fastdeploy_sd.distributed.link import LinkClosedError, RankLink
from fastdeploy_sd.distributed.messages import (
    AllGathered,
    AllReducedMin,
    AttemptDone,
    Contribution,
    Loaded,
    Measure,
    Measurement,
    RankFailed,
    RankReady,
    StopRank,
    decode,
    encode,
    frame_of,
)
from fastdeploy_sd.distributed.nodes import Nodes
from fastdeploy_sd.distributed.starting import RankStarter, log_exchange_error
from fastdeploy_sd.distributed.watch import LocalRank, RankWatch, WatchedRank
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.process.child import ChildProcess
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.worker.kv.kv_file import create_kv_file
from fastdeploy_sd.worker.ranks.commands import Attempt, Command, RankFailure
from fastdeploy_sd.worker.ranks.coordinator import GroupEnded

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", AttemptDone, Contribution, Loaded, Measurement, RankReady)

# From a closed link to the end of its process.
_END_S = 5.0
_STOP_S = 5.0
# The timeout of a rank that makes no progress while it loads: it may wait for a slow disk.
LOADING_TIMEOUT_S = 300.0


class RankProcesses:
    """All ranks but the first, running from the constructor to `close`. OtherRanks of rank 0's worker; one thread's.

    Args:
        rank_worker: "module:function" that makes what a rank computes with, a `process.RankWorkerFactory`.
        expert_file: see RankStarter.
    """

    def __init__(self, config: Config, rank_worker: str, expert_file: int | None = None) -> None:
        parallel = config.parallel
        self._nodes = Nodes(config) if parallel.num_nodes > 1 else None
        self._links: dict[int, RankLink] = {}
        self._ranks: dict[int, WatchedRank] = {}
        self._children: list[ChildProcess] = []
        self._timeout_s = parallel.rank_timeout_s
        self._posted: list[bytes] = []
        self._is_ready = False
        self._experts: ExpertService | None = None
        self._own_experts = [parallel.expert_rank(rank) for rank in range(parallel.tensor_parallel_size)]
        num_local = parallel.ranks_per_node
        with contextlib.closing(RankStarter(config, rank_worker, expert_file=expert_file)) as starter:
            self._local = starter.local_communicator(0)
            in_files = config.copies_kv and config.device == "cpu"
            self.kv_files = {rank: create_kv_file() for rank in range(1, num_local)} if in_files else {}
            for rank in range(1, num_local):
                child, self._links[rank] = starter.start_linked(rank, self.kv_files.get(rank))
                self._children.append(child)
                self._ranks[rank] = LocalRank(child)
        if self._nodes is None:
            assert self._local is not None
            self.communicator = self._local
        else:
            self.communicator = Communicator.over(
                self._nodes.exchange, 0, parallel.tensor_parallel_size, log_exchange_error, self._local
            )
            self._ranks |= self._nodes.ranks
            self._links |= {rank: remote.link for rank, remote in self._nodes.ranks.items()}
        self._all = frozenset(self._links)
        self._watch = RankWatch(self._ranks, LOADING_TIMEOUT_S, self._end)

    @property
    def failure_fd(self) -> int:
        """Readable from the first rank's end on."""
        return self._watch.fd

    # ---- while the model loads --------------------------------------------------------------------------------------

    def exchange(self, data: bytes) -> Sequence[bytes]:
        given = self._receive_all(Contribution)
        gathered = (data, *(given[rank].data for rank in sorted(given)))
        self._send_all(frame_of([encode(AllGathered(gathered))]))
        return gathered

    def smallest(self, measure: Callable[[], int]) -> int:
        self._receive_all(Loaded)
        self._send_all(frame_of([encode(Measure())]))
        own = measure()
        value = min(own, *(reply.value for reply in self._receive_all(Measurement).values()))
        self._send_all(frame_of([encode(AllReducedMin(value))]))
        return value

    def wait_ready(self) -> None:
        """Wait until all have loaded, or raise GroupEnded; from now on they must answer in time."""
        self._receive_all(RankReady)
        if self._nodes is not None:
            try:
                self._nodes.exchange.wait_connected()
            except ExchangeError as error:
                failure = self._watch.failure(_END_S)
                raise GroupEnded(InternalError(failure or f"the exchange between nodes: {error}")) from None
        self._is_ready = True
        self._watch.close()
        self._watch = RankWatch(self._ranks, self._timeout_s, self._end, self._waits_elsewhere)

    def share_experts(self, experts: ExpertService) -> None:
        self._experts = experts

    def _waits_elsewhere(self) -> bool:
        """Whether a rank of this engine waits for the experts of another engine, which may hang or be started again."""
        if self._experts is None:
            return False
        awaited = self._experts.awaited()
        awaited[:, self._own_experts] = False
        return bool(awaited[self._own_experts].any())

    # ---- steps; see OtherRanks --------------------------------------------------------------------------------------

    def post(self, command: Command) -> None:
        self._posted.append(encode(command))

    def flush(self) -> None:
        frame = frame_of(self._posted)
        self._posted.clear()
        self._send_all(frame)

    def send(self, attempt: Attempt) -> None:
        frame = frame_of([*self._posted, encode(attempt)])
        self._posted.clear()
        self._watch.expect(self._all, is_idle_otherwise=False)
        self._send_all(frame)

    def collect(self) -> Mapping[int, RankFailure]:
        return {rank: done.failure for rank, done in self._receive_all(AttemptDone).items() if done.failure}

    # ---- the end ----------------------------------------------------------------------------------------------------

    def leave(self, timeout_s: float) -> None:
        """Let the ranks end once no other engine needs their experts; no step follows."""
        frame = frame_of([*self._posted, encode(StopRank(timeout_s))])
        self._posted.clear()
        for link in self._links.values():
            with contextlib.suppress(LinkClosedError):
                link.send(frame)

    def close(self) -> None:
        """End the ranks, by force if needed, and free all that they hold."""
        self._watch.close()
        self.leave(0.0)
        deadline = time.monotonic() + _STOP_S
        for rank, process in self._ranks.items():
            if not _has_ended(process, deadline - time.monotonic()):
                logger.warning("rank %d does not end and is killed", rank)
        self._free(self._watch.failure(0) or "")

    def kill(self, reason: str) -> None:
        """End the ranks at once, with an error."""
        self._watch.close()
        self._free(reason)

    def _free(self, reason: str) -> None:
        for child in self._children:
            child.close()
        for link in self._links.values():
            link.close()
        for fd in self.kv_files.values():
            os.close(fd)
        self.communicator.close()
        if self._nodes is not None:
            if self._local is not None:
                self._local.close()
            self._nodes.close(reason)

    def _end(self, reason: str) -> None:
        """After a rank has ended, end every wait of the other ranks and of this one."""
        if self._is_ready:  # before that, the caller reports once why the model cannot be loaded
            logger.error("%s", reason)
        self.communicator.abort()
        if self._experts is not None:
            self._experts.abort()
        for link in self._links.values():
            link.shut()

    def _send_all(self, frame: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(frame)
            except LinkClosedError:
                raise self._ended(rank) from None

    def _receive_all(self, kind: type[ReplyT]) -> dict[int, ReplyT]:
        """Return one reply of each rank; raises GroupEnded where one has ended, or sent another reply."""
        awaited, replies = self._all, dict[int, ReplyT]()
        for rank, link in self._links.items():
            self._watch.expect(awaited, is_idle_otherwise=True)
            try:
                frame = link.receive()
            except LinkClosedError:
                raise self._ended(rank) from None
            replies[rank] = self._read(rank, frame, kind)
            awaited -= {rank}
        self._watch.expect(frozenset(), is_idle_otherwise=False)
        return replies

    def _read(self, rank: int, frame: bytes, kind: type[ReplyT]) -> ReplyT:
        try:
            [reply] = decode(frame)
        except (ProtocolError, ValueError) as error:
            raise GroupEnded(InternalError(f"rank {rank}: unreadable answer: {error}")) from None
        if isinstance(reply, RankFailed):
            raise GroupEnded(reply.error.to_exception())
        if not isinstance(reply, kind):
            name = type(reply).__name__
            raise GroupEnded(InternalError(f"rank {rank}: expected {kind.__name__}, got {name}"))
        return reply

    def _ended(self, rank: int) -> GroupEnded:
        """Return the error of a closed link: a rank's own reason, else how the first one ended."""
        failure = self._watch.failure(_END_S)
        for link in self._links.values():
            while (frame := link.leftover()) is not None:
                with contextlib.suppress(ProtocolError):
                    for reply in decode(frame):
                        if isinstance(reply, RankFailed):
                            return GroupEnded(reply.error.to_exception())
        return GroupEnded(InternalError(failure or f"rank {rank} has closed its link"))


def _has_ended(rank: WatchedRank, timeout_s: float) -> bool:
    fd = rank.open_end()
    if fd is None:
        return True
    try:
        return bool(select.select([fd], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(fd)
