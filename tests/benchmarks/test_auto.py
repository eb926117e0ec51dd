"""`bench auto`: settings, turns of several engines, the numbers of a cell, table and plot, and one real cell."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks import auto
from benchmarks.auto_report import FINE, SHORT, SLOWER, auto_table, save_plot, verdict
from benchmarks.interleaved import Turns, cell_metrics, run_in_turns
from benchmarks.offline_run import Timeline
from benchmarks.record import Record
from benchmarks.speculation_run import Case
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.draft_methods import NAIVE
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.proposers import OracleProposer
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel

PROMPTS = [np.array([5, 6, 7], np.int32), np.array([9, 9], np.int32)]
TURNS = Turns(temperature=0.0)


def engine(case: Case, k: int) -> Engine:
    """The toy engine, which always drafts `k` right tokens for the case's requests."""
    info = toy_info(num_blocks=64, max_draft_tokens=k)
    if k == 0:
        return Engine(toy_config(), ToyExecutor(info, None))
    toy = ToyModel(info.vocab_size)
    longer = dataclasses.replace(case, output_len=case.output_len + k + 1)
    requests = [r for repeat in range(3) for number in (0, 1) for r in longer.requests(repeat, number)]
    known = {r.request_id: [*r.prompt_token_ids.tolist(), *toy.generate(r)] for r in requests}
    return Engine(toy_config(), ToyExecutor(info, OracleProposer(known, info.vocab_size)))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("workload", ["completion", "repeated"])
def test_all_settings_run_the_same_requests_in_turns(workload: str) -> None:
    case = Case(workload, PROMPTS, output_len=25)
    engines = {NAIVE: engine(case, 0), "one": engine(case, 1), "two": engine(case, 2), "chooser": engine(case, 3)}
    repeats = [run_in_turns(engines, case, TURNS, repeat) for repeat in range(2)]
    assert engines["two"].stats().num_requests == 2 * len(PROMPTS) * (2 if workload == "repeated" else 1)
    # Every step is a second long, so the speed-up is that of tokens per step.
    metrics = cell_metrics(repeats, {NAIVE, "one", "two"})
    assert [round(s["speed_up"], 6) for s in metrics["settings"].values()] == [1.0, 2.0, 3.0, 4.0]
    assert [s["tokens_per_step"] for s in metrics["settings"].values()] == [1.0, 2.0, 3.0, 4.0]
    assert (metrics["best"], metrics["over_best"]) == ("two", {"chooser": pytest.approx(4 / 3)})
    assert metrics["has_same_tokens"] is True
    assert {name: len(sample.window_steps_s) for name, sample in repeats[0].items()} == {
        NAIVE: 24, "one": 12, "two": 8, "chooser": 6,
    }  # fmt: skip
    assert (metrics["settings"]["two"]["num_steps"], metrics["settings"]["two"]["num_drafts"]) == (8, 2 * 2 * 8)
    other = {name: [0] for name in repeats[0]["two"].token_ids}
    changed = repeats[0] | {"two": dataclasses.replace(repeats[0]["two"], token_ids=other)}
    assert cell_metrics([changed], {NAIVE})["has_same_tokens"] is False


@pytest.mark.usefixtures("ticking")
def test_luck_in_one_repeat_makes_no_setting_the_best_there() -> None:
    case = Case("completion", PROMPTS, output_len=25)
    engines = {NAIVE: engine(case, 0), "one": engine(case, 1), "lucky": engine(case, 1), "chooser": engine(case, 1)}
    repeats = [run_in_turns(engines, case, TURNS, repeat) for repeat in range(3)]
    rates = [("lucky", 0.5), ("lucky", 0.5), ("one", 0.25)]  # who took so much of its time in which repeat
    for samples, (name, part) in zip(repeats, rates, strict=True):
        samples[name] = dataclasses.replace(
            samples[name], window_steps_s=[part * s for s in samples[name].window_steps_s]
        )
    # Chosen where it is compared as well, the best would be twice as fast in two of three repeats.
    assert cell_metrics(repeats, {NAIVE, "one", "lucky"})["over_best"] == {"chooser": pytest.approx(1.0)}
    assert cell_metrics(repeats[:1], {NAIVE, "one", "lucky"})["over_best"] == {"chooser": pytest.approx(0.5)}


@pytest.mark.usefixtures("ticking")
def test_all_tokens_count_however_early_some_requests_end() -> None:
    case = Case("completion", PROMPTS, output_len=25)
    drafting = engine(case, 3)
    line = Timeline(
        drafting, [dataclasses.replace(r, max_tokens=n) for r, n in zip(case.requests(0), (5, 25), strict=True)], None
    )
    assert len(line.run().window_steps_s) == 1
    requests = [dataclasses.replace(r, max_tokens=n) for r, n in zip(case.requests(1), (5, 25), strict=True)]
    whole = Timeline(drafting, requests, None, to_last_end=True).run()
    assert (len(whole.window_steps_s), whole.window_tokens) == (6, 4 + 24)


def test_settings() -> None:
    settings = auto.read_settings(["suffix", "ngram-12", "mtp-ngram", "mtp-ngram-4"])
    assert [(name, s.label, s.num_speculative_tokens) for name, s in settings.items()] == [
        (NAIVE, NAIVE, 0),
        ("suffix", "suffix", 8),
        ("ngram-12", "ngram", 12),
        ("mtp-ngram", "mtp-ngram", 5),
        ("mtp-ngram-4", "mtp-ngram", 4),
    ]
    assert auto.fixed_settings(settings) == set(settings)
    chosen = auto.read_settings(auto.SETTINGS)
    assert set(chosen) - auto.fixed_settings(chosen) == {"auto"}
    for wrong in ("eagle-3", "ngram-0", "ngram-"):
        with pytest.raises(ConfigError, match=f"settings: expected one of ngram, .*, got '{wrong}'"):
            auto.read_settings([wrong])
    with pytest.raises(ConfigError, match="settings: expected each once, got 'mtp' twice"):
        auto.read_settings(["mtp", "mtp"])


def record(workload: str, batch: int, speed_up: float) -> Record:
    number = {"tokens_per_s": 50.0, "tokens_per_step": 1.5, "acceptance_length": 2.5}
    settings = {
        name: number | {"speed_up": value, "speed_up_min": value - 0.1, "speed_up_max": value + 0.1}
        for name, value in ((NAIVE, 1.0), ("ngram-5", 0.8), ("chooser", speed_up))
    }
    return Record(
        kind="auto",
        name="m",
        config={},
        hardware={},
        workload={"model": "m", "workload": workload, "batch": batch, "temperature": 0.0},
        metrics={"settings": settings, "best": NAIVE, "over_best": {"chooser": speed_up}, "has_same_tokens": True},
    )


def test_a_table_has_a_row_per_cell_and_a_column_per_setting() -> None:
    table = auto_table([record("free-text", 8, 0.97), record("free-text", 1, 1.5), record("code-edit", 8, 2.0)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0][5:] == ["ngram-5", "chooser", "Best fixed", "chooser / best", "Same tokens"]
    assert [row[1:4] for row in rows[2:]] == [["code-edit", "0", "8"], ["free-text", "0", "1"], ["free-text", "0", "8"]]
    assert rows[4][4:] == ["50", "0.80x (1.50, 2.50)", "0.97x (1.50, 2.50)", NAIVE, "0.97x", "yes"]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    save_plot([record("free-text", 1, 1.5), record("code-edit", 8, 0.9)], tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert [int.from_bytes(data[i : i + 4], "big") for i in (16, 20)] == [3 * 480, 384]


def test_a_cell_has_the_colour_of_what_it_misses() -> None:
    slower, short, fine = record("random", 8, 0.97), record("random", 8, 0.98), record("random", 8, 1.1)
    short.metrics["over_best"]["chooser"] = 0.96
    assert [verdict(r) for r in (slower, short, fine)] == [SLOWER, SHORT, FINE]


def test_one_cell_of_the_bundled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "OUTPUT_DIR", tmp_path)
    sizes = ["--batch-sizes", "2", "--output-len", "32", "--repeats", "1", "--temperature", "0.8"]
    one_thread = ["--cpu-time", "--num-threads", "1"]
    settings = ["--settings", "ngram-2", "mtp-1", "naive", "auto", "--workloads", "random", "--explain"]
    assert auto.main(["--models", "demo", *settings, *sizes, *one_thread, "--out", str(tmp_path / "out")]) == 0
    [found] = Record.load_all(tmp_path / "out")
    assert list(found.metrics["settings"]) == [NAIVE, "ngram-2", "mtp-1", auto.PLAIN_AGAIN, "auto"]
    assert list(found.metrics["over_best"]) == ["auto"]
    assert found.metrics["has_same_tokens"] is True
    assert found.metrics["settings"]["mtp-1"]["acceptance_length"] > 1
    text = (tmp_path / "out" / "auto.md").read_text()
    assert text == capsys.readouterr().out
    assert "Drafts / step" in text
    assert (tmp_path / "out" / "auto.png").is_file()
    with pytest.raises(ConfigError, match="num_threads: expected 1 with --cpu-time, got 2"):
        auto.main(["--models", "demo", "--cpu-time", "--num-threads", "2"])
