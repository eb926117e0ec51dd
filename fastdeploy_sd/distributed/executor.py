"""Executors of any number of ranks: rank 0 computes in this process, the others in processes of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.distributed.expert_monitor import ExpertMonitor
from fastdeploy_sd.distributed.expert_planner import ExpertPlanner
from fastdeploy_sd.distributed.expert_process import shared_experts
from fastdeploy_sd.distributed.process import DEFAULT_RANK_WORKER
from fastdeploy_sd.distributed.processes import RankProcesses
from fastdeploy_sd.distributed.starting import expert_place, threads_per_rank
from fastdeploy_sd.engine.interfaces.executor import AdapterReader, Executor, WatchPrompts
from fastdeploy_sd.engine.interfaces.spread_experts import SpreadExperts
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.types import SchedulerOutput, StepResult
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.worker.ranks.coordinator import GroupEnded
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)

# Of ranks that will serve. One that is gone is started again.
_BEFORE_SERVING = ("absent", "loading", "gone")
_POLL_S, _LOG_EVERY_S = 0.02, 30.0

if TYPE_CHECKING:
    from fastdeploy_sd.spec_decode.control.profile import CostProfile
    from fastdeploy_sd.spec_decode.proposer import MakeProposer
    from fastdeploy_sd.worker.kv.kv_access import AnyPages
    from fastdeploy_sd.worker.kv.kv_identity import KvIdentity
    from fastdeploy_sd.worker.step.layer_signals import LayerSignals


class KvExecutor(Executor, Protocol):
    """An executor that reaches the KV of all ranks, where the configuration needs it; see LocalExecutor."""

    kv_pages: AnyPages
    kv_identity: KvIdentity
    layer_signals: LayerSignals | None
    expert_monitor: SpreadExperts | None
    adapters: AdapterReader | None

    @property
    def experts(self) -> ExpertService | None: ...

    def begin_drain(self) -> None: ...

    def leave(self, timeout_s: float) -> None: ...

    def watch_prompts(self, watch: WatchPrompts | None) -> None: ...


CreateFirst = Callable[[Config, RankGroup], KvExecutor]


class MultiProcessExecutor:
    """Rank 0's executor and the other ranks' processes; see interfaces.executor.Executor."""

    def __init__(self, first: KvExecutor, others: RankProcesses) -> None:
        self._first, self._others = first, others
        self._kept = ExitStack()
        self._is_shut_down = False
        self.model_info, self.block_store, self.grammars = first.model_info, first.block_store, first.grammars
        self.kv_pages, self.kv_identity = first.kv_pages, first.kv_identity
        self.layer_signals, self.experts, self.adapters = first.layer_signals, first.experts, first.adapters
        self.expert_monitor: SpreadExperts | None = None

    @property
    def failure_fd(self) -> int:
        return self._others.failure_fd

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """See Executor.execute; raises InternalError where a rank has ended or hangs."""
        try:
            return self._first.execute(plan)
        except GroupEnded as end:
            raise end.error from None

    def watch_prompts(self, watch: WatchPrompts | None) -> None:
        """See LocalExecutor.watch_prompts."""
        self._first.watch_prompts(watch)

    def begin_drain(self) -> None:
        """See ServingExecutor."""
        self._first.begin_drain()

    def leave(self, timeout_s: float) -> None:
        """See ServingExecutor."""
        self._others.leave(timeout_s)
        self._first.leave(timeout_s)

    def keep(self, kept: ExitStack) -> None:
        """Close this at `shutdown`."""
        self._kept = kept

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            with self._kept:
                try:
                    self._first.shutdown()
                finally:
                    self._others.close()


def create_executor(
    config: Config, make_proposer: MakeProposer | None = None, expert_file: int | None = None
) -> KvExecutor:
    """Load the configured model on as many ranks as are configured; see worker.executor.create_executor.

    Where experts are spread, it returns when all ranks serve theirs. `expert_file`: see ExpertPlace, shared with other
    engines; None = there is none.

    For a method that chooses drafts by their cost, the times of steps are measured unless a file has them.

    Raises:
        CheckpointError, ConfigError: the model cannot be loaded as configured.
        InternalError: a rank broke while loading.
        Unavailable: another node has not joined in time.
    """
    from fastdeploy_sd.worker.executor import create_executor as create_rank  # brings in Paddle

    if config.parallel.own_node() != 0:
        text = "node_rank: expected 0, as `fastdeploy-sd serve` starts the ranks of the other nodes, got another"
        raise ConfigError(text, param="node_rank")
    if config.parallel.shares_experts and expert_file is None:
        size = config.parallel.data_parallel_size
        text = f"data_parallel_size: expected 1 with enable_expert_parallel, as one engine runs alone here, got {size}"
        raise ConfigError(text, param="data_parallel_size")
    load = create_rank if make_proposer is None else partial(create_rank, make_proposer=make_proposer)
    step_stats = StepStats() if make_proposer is None and METHODS[config.speculative.method].chooses else None
    if step_stats is not None:
        load = partial(load, step_stats=step_stats)
    with ExitStack() as kept:
        file = kept.enter_context(shared_experts(config))[0] if expert_file is None else expert_file
        executor: KvExecutor = (
            load(config, group=RankGroup(expert_place=expert_place(config.parallel, 0, file)))
            if config.parallel.tensor_parallel_size == 1
            else start_ranks(config, lambda c, group: load(c, group=group), DEFAULT_RANK_WORKER, file)
        )
        if config.parallel.expert_ranks > 1:
            _wait_until_all_serve(executor)
        if isinstance(executor, MultiProcessExecutor):
            executor.keep(kept.pop_all())
    if step_stats is not None and config.splitwise.splitwise_role != "prefill":
        step_stats.profile = _profile_of(config, executor)
    if config.parallel.expert_ranks > 1:  # only now: what was measured says nothing about requests
        assert executor.experts is not None
        executor.expert_monitor = _monitor(config.parallel, executor.experts)
    return executor


def _monitor(parallel: ParallelConfig, experts: ExpertService) -> ExpertMonitor:
    """Return what tells of an engine's experts, after having begun to balance them where that is asked for."""
    planner: ExpertPlanner | None = None
    if parallel.eplb is not None and parallel.expert_rank(0) == 0:
        eplb = parallel.eplb
        interval_s = eplb.redundant_expert_dump_workload_interval
        planner = ExpertPlanner(experts, eplb.redundant_experts_num, interval_s, parallel.num_hosts)
        planner.start()
    first = parallel.expert_rank(0)
    return ExpertMonitor(experts, range(first, first + parallel.tensor_parallel_size), planner)


def _wait_until_all_serve(executor: KvExecutor) -> None:
    """Wait for the ranks of other engines, however long these load: who has started them ends this one with them."""
    assert executor.experts is not None
    try:
        next_line = time.monotonic() + _LOG_EVERY_S
        while waits := [str(i) for i, state in enumerate(executor.experts.states()) if state in _BEFORE_SERVING]:
            if time.monotonic() > next_line:
                next_line += _LOG_EVERY_S
                logger.info("waiting for the experts of rank %s", " and ".join(waits))
            time.sleep(_POLL_S)
    except BaseException:
        executor.shutdown()
        raise


def _profile_of(config: Config, executor: KvExecutor) -> CostProfile | None:
    """Return the times of steps, for a method that chooses; shuts the executor down where measuring fails."""
    from fastdeploy_sd.worker.autotune.cost_file import kept_profile

    try:
        return kept_profile(config, executor.model_info, executor.execute)
    except BaseException:
        executor.shutdown()
        raise


def start_ranks(
    config: Config, create_first: CreateFirst, rank_worker: str, expert_file: int | None = None
) -> MultiProcessExecutor:
    """Start the other ranks, and load rank 0's part of the model meanwhile; raises as `create_executor`.

    Args:
        create_first: makes rank 0's executor.
        rank_worker, expert_file: see RankProcesses.
    """
    if config.device == "auto":  # one decides for all
        from fastdeploy_sd.worker.loading.device_choice import choose_device  # brings in Paddle

        config = replace(config, device=choose_device(config).kind)
    others = RankProcesses(config, rank_worker, expert_file)
    first: KvExecutor | None = None
    parallel = config.parallel
    try:
        group = RankGroup(
            0, parallel.tensor_parallel_size, threads_per_rank(parallel.ranks_per_node), others.communicator, others,
            smallest=others.smallest, exchange=others.exchange, kv_files=others.kv_files,
            expert_place=expert_place(parallel, 0, expert_file),
        )  # fmt: skip
        first = create_first(config, group)
        others.wait_ready()
    except BaseException as error:
        try:
            if first is not None:
                first.shutdown()
        finally:
            others.kill(error.error.message if isinstance(error, GroupEnded) else str(error) or repr(error))
        if isinstance(error, GroupEnded):
            raise error.error from None
        raise
    return MultiProcessExecutor(first, others)
