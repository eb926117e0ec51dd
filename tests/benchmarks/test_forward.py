"""The cost of a step by its rows: what is run, how rounds become ratios, and the table."""

from __future__ import annotations

import pytest

from benchmarks import step_cost
from benchmarks.forward import KIND, forward_table
from benchmarks.hardware import MemorySpeed
from benchmarks.peers.workers import ours
from benchmarks.record import Record
from benchmarks.step_cost import FixedDrafts, Round, RowSteps, median_ratio
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.toy_executor import ToyExecutor

MEMORY = MemorySpeed(40.0, 100.0)


def make_round(scale: float, read_gb_per_s: float = 40.0) -> Round:
    steps = {1: 10.0 * scale, 5: 11.0 * scale}
    return Round(steps, {m: t - 1.0 for m, t in steps.items()}, MemorySpeed(read_gb_per_s, 100.0))


def test_ratios_are_of_neighbours() -> None:
    """A machine that is twice as slow in one round does not change them."""
    assert median_ratio([make_round(1.0), make_round(2.0), make_round(1.0)], 5) == pytest.approx(1.1)


def test_share_of_the_bandwidth_of_the_same_round() -> None:
    assert make_round(1.0).bandwidth_share(200_000_000) == pytest.approx(0.5)
    assert make_round(1.0, read_gb_per_s=80.0).bandwidth_share(200_000_000) == pytest.approx(0.25)


@pytest.mark.usefixtures("ticking")
def test_every_number_of_rows_is_run_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "measure_memory", lambda: MEMORY)
    engine, drafts = make_engine()
    steps = RowSteps(engine, drafts, 20, 70)
    seen: list[Round] = []
    rounds = steps.run((1, 3, 5), 2, seen.append)
    steps.close()
    assert seen == rounds
    assert [set(r.step_ms) for r in rounds] == [{1, 3, 5}] * 2
    assert not engine.has_work()
    # Two drafts in four steps of a round, four drafts in four: three rounds, one of them not counted.
    assert engine.stats().num_draft_tokens == pytest.approx(3 * 4 * (2 + 4), abs=4)


def make_engine() -> tuple[Engine, FixedDrafts]:
    """For one request with up to four drafts."""
    info = toy_info(num_blocks=64, max_draft_tokens=4)
    drafts = FixedDrafts()
    return Engine(toy_config(max_num_seqs=1), ToyExecutor(info, drafts)), drafts


def test_a_step_over_another_number_of_rows_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "measure_memory", lambda: MEMORY)
    engine, drafts = make_engine()
    # There is room for the drafts of some steps only.
    with pytest.raises(InternalError, match=r"step: expected 4 drafts verified and 1 token, got [0-3] and 1"):
        RowSteps(engine, drafts, 20, 8).run((1, 5), 2, lambda _: None)


def test_a_step_with_another_number_of_tokens_has_no_time() -> None:
    """As when a draft is accepted: the context would grow by more than one."""
    engine, drafts = make_engine()
    steps = RowSteps(engine, drafts, 20, 70)
    before = engine.stats()
    outputs = engine.step()
    window = before, engine.stats()
    step_cost.verify_rows(1, window, outputs)
    for others in ([], outputs * 2):
        with pytest.raises(InternalError, match=f"expected 0 drafts verified and 1 token, got 0 and {len(others)}"):
            step_cost.verify_rows(1, window, others)
    steps.close()


def test_the_compared_forward_pass_is_over_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of the comparison with other servers, over the toy model."""
    info = toy_info(num_blocks=64, max_draft_tokens=4)
    monkeypatch.setattr(ours, "create_executor", lambda config, make: ToyExecutor(info, make(config, None)))
    worker = ours.Ours()
    worker.load("demo", "bfloat16", {"threads": 1, "max_seqs": 1, "max_len": 60, "kv_cache_dtype": "auto"})
    worker.context(list(range(1, 21)))
    assert len(worker.forward(5, 3)["seconds"]) == 3
    with pytest.raises(InternalError, match="step: expected 5 drafts verified and 1 token, got 4 and 1"):
        worker.forward(6, 2)  # more than the engine has room for
    worker.stop()


def test_table_is_ordered_and_complete() -> None:
    metrics = {
        "step_ms": {"1": 8.0, "5": 8.8},
        "ratio": {"1": 1.0, "5": 1.1},
        "bytes_per_step": 453_000_000,
        "bandwidth_share": 0.875,
        "outside_forward_us": 210.0,
        "read_gb_per_s_min": 36.0,
        "read_gb_per_s_max": 65.0,
    }
    config = {"quantization": "wint4", "dtype": "bfloat16", "kv_cache_dtype": "auto"}
    records = [
        Record(
            kind=KIND,
            name=f"c{n}",
            config=config,
            hardware={},
            workload={"context_len": n, "rows": [1, 5]},
            metrics=metrics,
        )
        for n in (4096, 512)
    ]
    lines = forward_table(records).splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["512", "4096"]
    assert lines[2] == "| wint4 | auto | 512 | 8.00 | 1.10 | 453 | 88% | 210 | 36-65 |"
