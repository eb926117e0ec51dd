"""Tells an engine where experts are and how evenly their rows are shared."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.distributed.expert_balance import Loads, balancedness
from fastdeploy_sd.distributed.expert_planner import ExpertPlanner
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.types import I64
from fastdeploy_sd.types.experts import ExpertReport, ExpertStats

_WINDOW_S = 10.0


class ExpertMonitor:
    """See engine.interfaces.SpreadExperts. Used by the thread that steps the engine.

    Args:
        service: of the engine's rank 0.
        own_ranks: of the engine, among all over which experts are spread.
        planner: of the first engine, where experts move.
    """

    def __init__(self, service: ExpertService, own_ranks: range, planner: ExpertPlanner | None) -> None:
        self._service, self._own_ranks, self._planner = service, own_ranks, planner
        self._cleared: I64 = np.zeros_like(service.counts())
        self._window = _Window(service.served())
        self._num_moves = 0

    def stats(self) -> ExpertStats:
        served, num_moving = self._service.served(), 0
        if self._planner is not None:
            num_ordered, num_moving = self._planner.num_ordered, self._planner.num_moving
            # Those that have been ordered since the first look are under way, and are counted later.
            self._num_moves = max(self._num_moves, num_ordered - num_moving)
        return ExpertStats(
            {rank: tuple(served[rank].tolist()) for rank in self._own_ranks},
            self._window.balancedness(served) if 0 in self._own_ranks else {},
            self._num_moves,
            num_moving,
        )

    def report(self, *, clears: bool = False) -> ExpertReport:
        """See SpreadExperts."""
        service, counts = self._service, self._service.counts()
        rows = counts - self._cleared
        if clears:
            self._cleared = counts
        layers = sorted(service.layers)
        placements = [service.placement(layer).tolist() for layer in layers]
        targets = [service.target(layer).tolist() for layer in layers]
        is_reached = tuple(
            all(map(_has_target, of_layers, goals))
            for of_layers, goals in zip(zip(*placements, strict=True), zip(*targets, strict=True), strict=True)
        )
        return ExpertReport(
            is_moving=not all(is_reached) or (self._planner is not None and self._planner.is_busy),
            num_rows=tuple(tuple(rows[i, : service.layers[i].num_experts].tolist()) for i in layers),
            placement=tuple(tuple(map(tuple, found)) for found in placements),
            is_reached=is_reached,
        )

    def rearrange(self) -> None:
        """See SpreadExperts."""
        if self._planner is None:
            text = "expected at the server of the first engine, with enable_eplb, got another"
            raise BadRequest(f"rearrange_experts: {text}", code="no_planner")
        if self._planner.is_busy:
            text = "expected when experts do not move, got one while they do; see /check_redundant"
            raise BadRequest(f"rearrange_experts: {text}", code="rearranging")
        self._planner.ask()


def _has_target(own: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a rank has the experts that it shall have in a layer, if any were said."""
    return max(target) < 0 or {*own, -1} == {*target, -1}


class _Window:
    """Rows of the last whole window; of the first one while that lasts."""

    def __init__(self, served: I64) -> None:
        self._begin, self._begin_s = served, time.monotonic()
        self._last: I64 | None = None

    def balancedness(self, served: I64) -> dict[int, float]:
        now = time.monotonic()
        if now - self._begin_s >= _WINDOW_S:
            self._last = served - self._begin
            self._begin, self._begin_s = served, now
        rows: Loads = (served - self._begin if self._last is None else self._last).astype(np.float64)
        return {layer: balancedness(of_ranks) for layer, of_ranks in enumerate(rows.T) if of_ranks.any()}
