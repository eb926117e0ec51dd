"""Pages leave a prefill instance layer by layer while its steps run, those only whose layer has stored every row."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest

from fastdeploy_sd.cli.verify import EngineVariant, compare, standard_methods
from fastdeploy_sd.disaggregation.prefill_engine import PrefillEngine
from fastdeploy_sd.types import I32, SchedulerOutput, StepResult
from fastdeploy_sd.worker.executor import LocalExecutor
from fastdeploy_sd.worker.step.runner import ModelRunner
from tests.engine.handover_pairs import Pair, open_pair
from tests.engine.models import References

pytestmark = pytest.mark.slow

WAY = EngineVariant("chunks", max_num_seqs=6, long_prefill_token_threshold=16, enable_prefix_caching=True)
DEADLINE_S = 120.0


class Watch:
    """Notes which layers are sent from which thread, and holds each step until the layers' thread had its turn."""

    def __init__(self, pair: Pair) -> None:
        self.early: list[int] = []
        self.late: list[int] = []
        self.num_layers_stored: list[int] = []
        self._engine: PrefillEngine = pair.prefill
        executor = self._engine._executor
        assert isinstance(executor, LocalExecutor)
        self._executor, self.runner = executor, executor._runner
        self._execute, self._send = executor.execute, pair.wire.prefill.send
        executor.execute = self.execute  # type: ignore[method-assign]
        pair.wire.prefill.send = self.send  # type: ignore[method-assign]

    def execute(self, plan: SchedulerOutput) -> StepResult:
        result = self._execute(plan)
        layers, signals = self._engine._layers, self._executor.layer_signals
        assert layers is not None
        assert signals is not None
        deadline = time.monotonic() + DEADLINE_S
        while layers._parts and layers._num_sent < min(signals.num_layers, layers._num_layers):
            assert time.monotonic() < deadline, "the layers' thread does not send"
            time.sleep(0.0005)
        if layers._parts:
            self.num_layers_stored.append(signals.num_layers)
        return result

    def send(self, transfer_id: str, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        is_early = threading.current_thread().name == "fdsd-layers"
        (self.early if is_early else self.late).append(layer)
        self._send(transfer_id, layer, first_block, block_ids)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_layers_are_sent_while_the_step_runs(references: References, enforce_eager: bool) -> None:
    reference = references.get("demo")
    way = EngineVariant("chunks", 6, long_prefill_token_threshold=16, enforce_eager=enforce_eager)
    [method] = standard_methods(["mtp"], [2], model_method="mtp")
    with open_pair(reference, (WAY, method), (way, method), seed=0) as pair:
        watch = Watch(pair)
        requests = reference.requests[:8]
        got = pair.run(requests, random.Random(0))
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, got) is None
        num_target = pair.wire.source_pages.num_target_layers  # type: ignore[union-attr]
        assert set(watch.num_layers_stored) == {num_target}
        # Without a prefix cache nothing is there before its step; draft layers run behind the target's.
        assert set(watch.early) == set(range(num_target))
        assert set(watch.late) == {num_target}


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("is_before", [False, True])
def test_layers_of_a_step_that_is_run_in_parts_are_not_mistaken(references: References, is_before: bool) -> None:
    """The first try fails before or behind its layers. What its parts signal says nothing about the whole step."""
    reference = references.get("demo")
    [method] = standard_methods(["naive"], [1], model_method="mtp")
    with open_pair(reference, (WAY, method), (WAY, method), seed=0) as pair:
        watch = Watch(pair)
        assert watch.runner is not None
        fail_first(watch.runner, is_before=is_before)
        got = pair.run(reference.requests, random.Random(0))
        assert compare(reference.answers, got) is None
        num_layers = pair.wire.source_pages.num_layers  # type: ignore[union-attr]
        assert set(watch.num_layers_stored) == {0 if is_before else num_layers}
        assert pair.wire.num_whole > 5


def fail_first(runner: ModelRunner, *, is_before: bool) -> None:
    """Fail the first try of each step, before or behind the model's pass."""
    run, forward = runner._run, runner._forward
    is_first = [False]

    def noted(plan: SchedulerOutput, rows: I32 | None = None) -> StepResult:
        is_first[0] = rows is None
        return run(plan, rows)

    def faulty() -> None:
        if is_before and is_first[0]:
            raise RuntimeError("the first try, before")
        forward()
        if is_first[0]:
            raise RuntimeError("the first try, behind")

    setattr(runner, "_run", noted)  # noqa: B010 (mypy takes methods for constants)
    setattr(runner, "_forward", faulty)  # noqa: B010
