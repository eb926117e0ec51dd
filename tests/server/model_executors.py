"""Executors on a real model, for `launch.run` to find by name: a test stops one between two steps, or loses its GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fastdeploy_sd.config import Config
from fastdeploy_sd.distributed.executor import create_executor as create_ranks
from fastdeploy_sd.types import SchedulerOutput, StepResult
from fastdeploy_sd.worker.executor import LocalExecutor, create_executor
from fastdeploy_sd.worker.step.batch import PendingRows

_POLL_S = 0.005


class Brake:
    """A file that has the engines of one role stop, told by both sides.

    Args:
        folder: of the deployment. role: whose.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self._order, self._report = folder / f"brake-{role}", folder / f"stopped-{role}"

    def pull(self, num_steps: int) -> None:
        """Have each engine of the role stop after so many further steps."""
        text = self._order.with_suffix(".new")
        text.write_text(str(num_steps))
        text.rename(self._order)

    def release(self) -> None:
        """Have them go on."""
        self._report.unlink(missing_ok=True)
        self._order.unlink(missing_ok=True)

    @property
    def stopped(self) -> int | None:
        """Process id of an engine that has stopped; None = none has."""
        text = self._report.read_text() if self._report.exists() else ""
        return int(text) if text else None

    def limit(self) -> int | None:
        """How many steps an engine may take; None = any number."""
        try:
            return int(self._order.read_text())
        except FileNotFoundError:
            return None

    def report(self) -> None:
        """An engine has stopped."""
        if not self._report.exists():
            self._report.write_text(str(os.getpid()))


class _BrakingExecutor(LocalExecutor):
    """Runs the model as ever between the stops."""

    brake: Brake
    num_steps = 0  # since the brake was pulled

    def execute(self, plan: SchedulerOutput) -> StepResult:
        while (limit := self.brake.limit()) is not None and self.num_steps >= limit:
            self.brake.report()
            time.sleep(_POLL_S)
        self.num_steps = 0 if limit is None else self.num_steps + 1
        return super().execute(plan)


def create_braking(config: Config, expert_file: int | None = None) -> LocalExecutor:
    """The model as it is, with a brake in the folder of the deployment."""
    executor = create_ranks(config, expert_file=expert_file)
    executor.__class__ = _BrakingExecutor
    assert isinstance(executor, _BrakingExecutor)
    executor.brake = Brake(Path(os.environ["XDG_STATE_HOME"]), config.splitwise.splitwise_role)
    return executor


def loses_gpu(folder: Path) -> Path:
    """The file that has the GPU of a server with this folder lost in its next step."""
    return folder / "lose-the-gpu"


def create_losing_gpu(config: Config) -> LocalExecutor:
    """The model as it is, until a kernel reads outside of what there is."""
    executor = create_executor(config)
    runner, order = executor._runner, loses_gpu(Path(os.environ["XDG_STATE_HOME"]))
    assert runner is not None
    build, memory = runner._batches.build, runner._memory

    def build_wrongly(plan: SchedulerOutput, before: PendingRows | None = None) -> None:
        build(plan, before)
        if memory.num_logits and order.exists():
            memory.logits_indices[0] = 1 << 20

    setattr(runner._batches, "build", build_wrongly)  # noqa: B010 (mypy takes methods for constants)
    return executor
