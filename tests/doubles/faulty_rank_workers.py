"""Real ranks on which some requests fail; the environment names the requests. Factories for `start_ranks` to find."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.layers.attention import Attention
from fastdeploy_sd.types import RequestId
from fastdeploy_sd.worker.executor import create_rank_worker
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from fastdeploy_sd.worker.ranks.rank_worker import RankWorker

CULPRITS = "FDSD_TEST_CULPRITS"
_SLOW_STORE_S = 0.003
_WAIT_S = 120.0


def create_failing_model(config: Config, group: RankGroup) -> RankWorker:
    """The model's pass fails before its first op."""
    rank_worker = create_rank_worker(config, group)
    real = rank_worker._forward

    def forward() -> None:
        _verify(_running(rank_worker))
        real()

    setattr(rank_worker, "_forward", forward)  # noqa: B010 (it lacks the results, which are bound already)
    return rank_worker


def create_late_model(config: Config, group: RankGroup) -> RankWorker:
    """The model's pass over a culprit begins when rank 0 has waited for it in vain, once."""
    rank_worker = create_rank_worker(config, group)
    real, culprits = rank_worker._forward, os.environ[CULPRITS].split()

    def forward() -> None:
        if not set(culprits).isdisjoint(_running(rank_worker)):
            culprits.clear()
            _wait_for_failure(rank_worker.collectives)
        real()

    setattr(rank_worker, "_forward", forward)  # noqa: B010 (it lacks the results, which are bound already)
    return rank_worker


def create_slow_stores(config: Config, group: RankGroup) -> RankWorker:
    """Every layer stores its KV late, if the ops run one by one."""
    real = Attention.store_kv

    def store(*args: Any) -> Any:
        time.sleep(_SLOW_STORE_S)
        return real(*args)

    setattr(Attention, "store_kv", store)  # noqa: B010 (mypy takes methods for constants)
    return create_rank_worker(config, group)


def create_failing_drafts(config: Config, group: RankGroup) -> RankWorker:
    """The draft layers fail when they have run."""
    rank_worker = create_rank_worker(config, group)
    passes = rank_worker._methods["mtp"]._passes  # type: ignore[attr-defined]
    real = passes.run

    def run(*, wants_logits: bool) -> object:
        found = real(wants_logits=wants_logits)
        memory = rank_worker._methods["mtp"]._memory  # type: ignore[attr-defined]
        rows = set(memory.table_rows[: memory.count].tolist())
        known = rank_worker._table._table_row_of
        _verify([i for i in _running(rank_worker) if known[i] in rows])
        return found

    passes.run = run
    return rank_worker


def _wait_for_failure(collectives: Any) -> None:
    """Until rank 0 has told the others that this attempt failed; see group_flags.h."""
    deadline = time.monotonic() + _WAIT_S
    flags = (ctypes.c_uint64 * 2).from_address(collectives._flags)
    while flags[1] != collectives._attempt + 1:
        assert time.monotonic() < deadline, "rank 0 does not give up"
        time.sleep(_SLOW_STORE_S)


def _running(rank_worker: RankWorker) -> list[RequestId]:
    assert rank_worker._ran is not None
    return list(rank_worker._ran.request_ids)


def _verify(request_ids: list[RequestId]) -> None:
    if not set(os.environ[CULPRITS].split()).isdisjoint(request_ids):
        raise RuntimeError("a rank that fails")
