"""Steps of the toy executor, run when their caller waits for them or at some moment before, as a device may."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from fastdeploy_sd.types import MADE_ON_DEVICE, DraftTokens, SchedulerOutput, StepResult
from tests.doubles.toy_executor import ToyExecutor


class ToyLauncher:
    """See interfaces.executor.Launcher.

    Args:
        late_rate: of the steps that run only when the caller waits for them.
        open_rate: of the open ones behind which another one may be started.
        drafts_async: whether only the executor learns the drafts of pending steps.

    Attributes:
        finished: plans, as they were run. num_ahead: steps that were started before the one before them was finished.
    """

    def __init__(
        self,
        executor: ToyExecutor,
        seed: int,
        late_rate: float = 0.7,
        open_rate: float = 0.9,
        *,
        drafts_async: bool = False,
    ) -> None:
        self._executor, self._rng = executor, random.Random(seed)
        self._late_rate, self._open_rate = late_rate, open_rate
        self._waiting: list[tuple[SchedulerOutput, bool]] = []
        self._run: list[tuple[SchedulerOutput, StepResult]] = []
        self._may_follow = True
        self.finished: list[SchedulerOutput] = []
        self.drafts_async = drafts_async
        self.num_ahead = 0

    def start(self, plan: SchedulerOutput, *, is_open: bool) -> bool:
        assert self._may_follow, "behind a step that nothing may follow"
        self.num_ahead += bool(self._waiting or self._run)
        assert len(self._waiting) + len(self._run) < 2, "more than two steps under way"
        self._may_follow = is_open and self._rng.random() < self._open_rate
        self._waiting.append((plan, self._may_follow))
        if self._rng.random() >= self._late_rate:
            self._run_all()
        return self._may_follow

    def finish(self) -> StepResult:
        if not self._run:
            self._run_first()
        plan, result = self._run.pop(0)
        self.finished.append(plan)
        self._may_follow = self._may_follow or not (self._run or self._waiting)
        return result

    def _run_all(self) -> None:
        while self._waiting:
            self._run_first()

    def _run_first(self) -> None:
        plan, is_open = self._waiting.pop(0)
        if self.drafts_async:
            plan = self._executor.with_lengths(plan)
        result = self._executor.execute(plan)
        if self.drafts_async and is_open:
            result = replace(result, drafts=_hidden(result.drafts))
        self._run.append((plan, result))


def _hidden(drafts: DraftTokens) -> DraftTokens:
    return replace(drafts, token_ids=np.full_like(drafts.token_ids, MADE_ON_DEVICE))
