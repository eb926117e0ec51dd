"""The cost of a step by its rows: what is run, how rounds become ratios, and the table."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.peers.workers.ours import Ours
from fastdeploy_sd.bench import step_cost
from fastdeploy_sd.bench.__main__ import main
from fastdeploy_sd.bench.forward_report import KIND, forward_table
from fastdeploy_sd.bench.hardware import MemorySpeed
from fastdeploy_sd.bench.record import Record
from fastdeploy_sd.bench.step_cost import FixedDrafts, Round, RowSteps, median_ratio
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.proposer import ProposerContext
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


def test_every_number_of_rows_is_run_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(step_cost.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(step_cost, "measure_memory", lambda: MEMORY)
    engine, drafts = make_engine()
    steps, seen = RowSteps(engine, drafts, 20, 70), []
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
    drafts = FixedDrafts(SpeculativeConfig(), ProposerContext(4, 100, info.vocab_size))
    return Engine(toy_config(max_num_seqs=1), ToyExecutor(info, drafts)), drafts


def test_a_step_over_another_number_of_rows_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "measure_memory", lambda: MEMORY)
    engine, drafts = make_engine()
    # There is room for the drafts of some steps only.
    with pytest.raises(InternalError, match=r"step: expected 4 drafts judged and 1 token, got [0-3] and 1"):
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
        with pytest.raises(InternalError, match=f"step: expected 0 drafts judged and 1 token, got 0 and {len(others)}"):
            step_cost.verify_rows(1, window, others)
    steps.close()


def test_the_compared_forward_pass_is_over_its_rows() -> None:
    """The worker of the comparison with other servers, over the toy model."""
    worker = Ours()
    worker._engine, worker._drafts = make_engine()
    worker._max_len = 60
    worker.context(list(range(1, 21)))
    before = worker._engine.stats().num_draft_tokens
    assert len(worker.forward(5, 3)["seconds"]) == 3
    assert worker._engine.stats().num_draft_tokens == before + 3 * 4
    with pytest.raises(InternalError, match="step: expected 5 drafts judged and 1 token, got 4 and 1"):
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
        Record(KIND, f"c{n}", config, {}, {"context_len": n, "rows": [1, 5], "rounds": 2}, metrics, [])
        for n in (4096, 512)
    ]
    lines = forward_table(records).splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["512", "4096"]
    assert lines[2] == "| wint4 | auto | 512 | 8.00 | 1.10 | 453 | 88% | 210 | 36-65 |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "rounds: expected at least 1, got 0"),
        (["--rows", "2", "4"], "rows: expected numbers from 1 on, 1 among them, got [2, 4]"),
        (["--contexts", "0"], "contexts: expected at least 1 token, got 0"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forward", *arguments]) == 2
    assert message in capsys.readouterr().err
