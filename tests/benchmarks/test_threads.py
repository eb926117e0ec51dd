"""What is counted per thread, and the speed beside a neighbour: of an engine that computes nothing."""

from __future__ import annotations

import numpy as np

from benchmarks.threads import measure, neighbour_table
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.ops.norm import rms_norm
from fastdeploy_sd.types import SchedulerOutput, StepResult
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.toy_executor import ToyExecutor
from tests.ops.backends import threads

ROWS: np.ndarray = np.ones((64, 1024), np.float32)


class _ExecutorWithOneLoop(ToyExecutor):
    """A step shares one loop: 64 rows of 16 KB each."""

    def execute(self, plan: SchedulerOutput) -> StepResult:
        rms_norm(ROWS, ROWS[0], 1e-5)
        return super().execute(plan)


def test_what_the_threads_do_in_a_step() -> None:
    engine = Engine(toy_config(max_num_seqs=2), _ExecutorWithOneLoop(toy_info(num_blocks=64)))
    with threads(2):
        cost = measure(engine, 2, num_pairs=2, seconds=0.02, processor=own_processors().allowed[-1])
    assert not engine.has_work()
    assert 0 < cost.ratio_least <= cost.ratio <= cost.ratio_most
    quiet, busy = cost.shares[:2], cost.shares[2:]
    for shares in (quiet, busy):
        assert [s.thread for s in shares] == [0, 1]
        assert {s.loops for s in shares} == {1}
        assert sum(s.pieces for s in shares) == 64
        np.testing.assert_allclose(sum(s.megabytes for s in shares), 64 * 16384 / 1e6)
    lines = neighbour_table(cost).splitlines()
    assert lines[0].startswith("| Neighbour | Thread | Loops | Pieces |")
    assert lines[2].startswith("| no | 0 | 1 | ")
    assert f"beside a neighbour: {cost.ratio:.2f}x" in lines[-1]
