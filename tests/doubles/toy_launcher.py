"""Steps of the toy executor, run when their caller waits for them or at some moment before, as a device may."""

from __future__ import annotations

import random

from fastdeploy_sd.types import SchedulerOutput, StepResult
from tests.doubles.toy_executor import ToyExecutor


class ToyLauncher:
    """See engine.executor.Launcher.

    Args:
        late_rate: of the steps that run only when somebody waits for them.
        open_rate: of the open ones behind which another one may be started.

    Attributes:
        finished: plans, as they were. num_ahead: steps that were started before the one before them was finished.
    """

    def __init__(self, executor: ToyExecutor, seed: int, late_rate: float = 0.7, open_rate: float = 0.9) -> None:
        self._executor, self._rng = executor, random.Random(seed)
        self._late_rate, self._open_rate = late_rate, open_rate
        self._waiting: list[SchedulerOutput] = []
        self._run: list[tuple[SchedulerOutput, StepResult]] = []
        self._may_follow = True
        self.finished: list[SchedulerOutput] = []
        self.num_ahead = 0

    def start(self, plan: SchedulerOutput, *, is_open: bool) -> bool:
        assert self._may_follow, "behind a step that nothing may follow"
        self.num_ahead += bool(self._waiting or self._run)
        assert len(self._waiting) + len(self._run) < 2, "more than two steps under way"
        self._waiting.append(plan)
        if self._rng.random() >= self._late_rate:
            self._run_all()
        self._may_follow = is_open and self._rng.random() < self._open_rate
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
        plan = self._waiting.pop(0)
        self._run.append((plan, self._executor.execute(plan)))
