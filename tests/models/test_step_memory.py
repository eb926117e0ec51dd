"""Steps run in memory that was laid out when the server started: nothing moves, and nothing as large is allocated."""

from __future__ import annotations

import gc
import pathlib
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.program.program import Program
from fastdeploy_sd.spec_decode.model_based.proposer import ModelProposer
from fastdeploy_sd.types import SchedulerOutput, StepResult
from fastdeploy_sd.worker.step.forward import RecordedForward
from fastdeploy_sd.worker.step.runner import ModelRunner
from tests.models.mtp_models import make_model
from tests.models.mtp_runs import make_engine, make_requests

pytestmark = pytest.mark.slow

NUM_STEPS, MAX_NUM_SEQS = 50, 16384
# A column with a value per request takes 64 KiB; what a step of four requests needs besides is far less.
ALLOWED_BYTES = 48 << 10


def arrays_of(owner: Any) -> Iterator[np.ndarray]:
    for value in vars(owner).values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, np.ndarray):
                yield part


def pointers_of(call: BoundCall) -> Iterator[int]:
    for name, *_ in call.params._fields_:
        value = getattr(call.params, name)
        if isinstance(value, int) and value > 1 << 32:
            yield value


def addresses(runner: ModelRunner, mtp: ModelProposer | None) -> list[int]:
    """Of everything that a step writes, and as the native calls have it."""
    forward, verifier, batches = runner._forward, runner._verifier, runner._batches
    assert isinstance(forward, RecordedForward)
    assert isinstance(forward.program, Program)
    assert isinstance(forward.logits, np.ndarray)
    owners: list[Any] = [batches._memory, *([] if mtp is None else [mtp._memory])]
    found = [array.ctypes.data for owner in owners for array in arrays_of(owner)]
    found += [output.data_ptr() for output in forward.program.outputs] + [forward.logits.ctypes.data]
    for call in (
        batches._prepare_chains,
        batches._append,
        verifier._draw,
        verifier._accept,
        forward.program._native._run,
    ):
        found += pointers_of(call)
    if mtp is not None:
        found += [*pointers_of(mtp._plan._plan), *pointers_of(mtp._plan._collect)]
        found += [output.data_ptr() for p in mtp._passes._programs.values() for output in p.outputs]  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("method", ["naive", "ngram", "mtp"])
def test_nothing_moves_and_nothing_of_a_bounds_size_is_allocated(method: str, tmp_path: pathlib.Path) -> None:
    path = make_model(tmp_path, "ernie4_5-tiny", "ernie-folder").path
    num_drafts = 0 if method == "naive" else 2
    engine, recorder = make_engine(
        str(path), num_drafts, method=method, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=4 * MAX_NUM_SEQS
    )
    runner: ModelRunner = engine._executor._runner  # type: ignore[attr-defined]
    mtp: ModelProposer | None = None
    if method == "mtp":
        router = recorder.proposer.method  # type: ignore[attr-defined]
        made = router._method(router._configured).method
        assert isinstance(made, ModelProposer)
        mtp = made
    runner._drafting._guard = recorder.proposer  # type: ignore[assignment] # the recorder keeps what it saw
    peaks, places = list[int](), list[list[int]]()
    execute = runner.execute

    def measured(plan: SchedulerOutput) -> StepResult:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        result = execute(plan)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        places.append(addresses(runner, mtp))
        return result

    setattr(runner, "execute", measured)  # noqa: B010 (mypy takes methods for constants)
    for request in make_requests([np.arange(4, 40, dtype=np.int32)] * 4, 3 * NUM_STEPS):
        engine.submit(request)
    gc.disable()  # a collection amid a step would hide what it allocated
    tracemalloc.start()
    try:
        while len(peaks) < NUM_STEPS:
            engine.step()
    finally:
        tracemalloc.stop()
        gc.enable()
    # The first steps also make what is made once: caches of the interpreter, columns of sources.
    assert max(peaks[5:]) < ALLOWED_BYTES
    assert all(now == places[0] for now in places)
    assert len(places[0]) > 40
