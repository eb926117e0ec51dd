"""The speculation benchmark: pairs of runs, the table, the plot, the configurations and their prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import speculation_run
from benchmarks.configurations import METHODS, configurations_by_name, configurations_from_files, with_bounds
from benchmarks.hardware import MemorySpeed
from benchmarks.prompts import MAX_PROMPT_LEN, WORKLOADS, make_prompts
from benchmarks.record import Record, config_json
from benchmarks.speculation import save_plot, speculation_table
from benchmarks.speculation_run import Case, Pair, pair_metrics, run_pairs
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.proposers import OracleProposer
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel

pytestmark = pytest.mark.slow

PROMPTS = [np.array([5, 6, 7], np.int32), np.array([9, 9], np.int32)]


@pytest.fixture
def _fixed_machine(ticking: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_run, "measure_memory", lambda: MemorySpeed(40.0, 100.0))


def engine(case: Case | None, k: int) -> Engine:
    """The toy engine; with a case, one that always drafts right for its requests."""
    info = toy_info(num_blocks=64, max_draft_tokens=k)
    proposer = None
    if case is not None:
        toy = ToyModel(info.vocab_size)
        longer = dataclasses.replace(case, output_len=case.output_len + k + 1)
        requests = [r for repeat in range(9) for number in (0, 1) for r in longer.requests(repeat, number)]
        known = {r.request_id: [*r.prompt_token_ids.tolist(), *toy.generate(r)] for r in requests}
        proposer = OracleProposer(known, info.vocab_size)
    return Engine(toy_config(), ToyExecutor(info, proposer))


@pytest.mark.usefixtures("_fixed_machine")
@pytest.mark.parametrize("workload", ["completion", "repeated"])
def test_drafts_that_are_all_right_are_that_much_faster(workload: str) -> None:
    case = Case(workload, PROMPTS, output_len=13)
    seen: list[Pair] = []
    naive = engine(None, 0)
    pairs = run_pairs(naive, engine(case, 3), case, 2, seen.append)
    assert pairs == seen
    # One run to warm up and two that count; what is repeated is asked for twice.
    assert naive.stats().num_requests == 3 * 2 * (2 if workload == "repeated" else 1)
    metrics = pair_metrics(pairs)
    # Twelve tokens after the first: twelve steps of one, or three of four, each a second long.
    assert [len(p.naive.window_steps_s) for p in pairs] == [12, 12]
    assert [len(p.drafting.window_steps_s) for p in pairs] == [3, 3]
    assert metrics["speed_up"] == metrics["speed_up_min"] == metrics["speed_up_max"] == 4.0
    assert (metrics["acceptance_rate"], metrics["acceptance_length"], metrics["tokens_per_step"]) == (1.0, 4.0, 4.0)
    assert (metrics["decode_tokens_per_s"], metrics["naive_decode_tokens_per_s"]) == (8.0, 2.0)
    assert (metrics["step_ms"], metrics["naive_step_ms"]) == (1000.0, 1000.0)
    assert metrics["has_same_tokens"] is True
    assert (metrics["read_gb_per_s_min"], metrics["read_gb_per_s_max"]) == (40.0, 40.0)


@pytest.mark.usefixtures("_fixed_machine")
def test_other_tokens_are_noticed() -> None:
    case = Case("completion", PROMPTS, output_len=6)
    pairs = run_pairs(engine(None, 0), engine(None, 0), case, 1, lambda _: None)
    assert pair_metrics(pairs)["has_same_tokens"] is True
    request_id, token_ids = next(iter(pairs[0].drafting.token_ids.items()))
    changed = {**pairs[0].drafting.token_ids, request_id: [*token_ids[:-1], token_ids[-1] + 1]}
    other = dataclasses.replace(pairs[0].drafting, token_ids=changed)
    assert pair_metrics([dataclasses.replace(pairs[0], drafting=other)])["has_same_tokens"] is False


def test_repeats_share_nothing_that_could_be_learnt() -> None:
    case = Case("completion", PROMPTS, output_len=6)
    one, same, other = case.requests(0), case.requests(0, number=1), case.requests(1)
    assert {r.cache_salt for r in one} == {r.cache_salt for r in same} != {r.cache_salt for r in other}
    assert len({r.request_id for r in (*one, *same, *other)}) == 6
    assert case.requests(0)[0].cache_salt != Case("repeated", PROMPTS, 6).requests(0)[0].cache_salt


def record(method: str, speed_up: float, workload: str = "completion", **changes: Any) -> Record:
    metrics = {
        "speed_up": speed_up, "speed_up_min": speed_up - 0.1, "speed_up_max": speed_up + 0.1,
        "decode_tokens_per_s": 100.0 * speed_up, "naive_decode_tokens_per_s": 100.0, "acceptance_rate": 0.25,
        "acceptance_length": 1.75, "tokens_per_step": 1.5, "step_ms": 12.0, "naive_step_ms": 10.0, "forward_ms": 9.0,
        "verify_ms": 1.0, "draft_ms": 2.0, "has_same_tokens": True, "read_gb_per_s_min": 34.0,
        "read_gb_per_s_max": 51.0,
    }  # fmt: skip
    return Record(
        kind="speculation",
        name=method,
        config={"speculative_config": {"method": method, "num_speculative_tokens": 3}},
        hardware={},
        workload={"workload": workload, "batch": 4, "method": method, "is_lossy": False, "repeats": 3},
        metrics=metrics | changes,
    )


def test_a_loss_is_in_plain_sight() -> None:
    records = [record("suffix", 0.8), record("mtp", 1.9, "code-edit"), record("ngram", 1.2, acceptance_rate=None)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in speculation_table(records).splitlines()]
    assert [row[:6] for row in rows[2:]] == [
        ["code-edit", "4", "mtp", "3", "1.90x", "1.80-2.00"],
        ["completion", "4", "ngram", "3", "1.20x", "1.10-1.30"],
        ["completion", "4", "suffix", "3", "0.80x (slower)", "0.70-0.90"],
    ]
    assert [row[9] for row in rows[2:]] == ["25%", "-", "25%"]
    assert rows[2][-2:] == ["34-51", "yes"]
    assert len(rows[0]) == len(rows[2])


def test_a_speed_up_of_other_tokens_says_so() -> None:
    wrong = record("mtp", 2.0, has_same_tokens=False)
    assert speculation_table([wrong]).endswith("| NO |")
    lossy = dataclasses.replace(wrong, workload={**wrong.workload, "is_lossy": True})
    assert speculation_table([lossy]).endswith("| no (lossy) |")


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    records = [record(m, s, w) for m, s in (("ngram", 0.7), ("mtp", 1.4)) for w in ("completion", "free-text")]
    save_plot(records, tmp_path / "plot.png", "demo")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (2 * 480, 2 * 384)


def test_configurations_by_name() -> None:
    found = configurations_by_name(list(METHODS), ["--model", "demo", "--quantization", "wint4"], "bench")
    assert [c.config.speculative.label for c in found] == list(METHODS)
    assert all(c.config.model.quantization == "wint4" for c in found)
    assert found[0].naive_config.speculative == SpeculativeConfig()
    assert found[0].naive_config.model == found[0].config.model


def test_configurations_from_files() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "yaml"
    files = [str(folder / f"demo-{name}-cpu.yaml") for name in ("mtp-suffix", "ngram")]
    found = configurations_from_files(files, ["--max-num-seqs", "5"], "bench")
    assert [(c.name, c.config.scheduler.max_num_seqs) for c in found] == [("mtp-suffix", 5), ("ngram", 5)]
    with pytest.raises(ConfigError, match="config: expected a method that drafts, got naive in "):
        configurations_from_files([str(folder / "demo-naive-cpu.yaml")], [], "bench")


def write_yaml(path: Path, **keys: object) -> str:
    """A configuration of the demo model with n-gram drafts unless `keys` say otherwise."""
    values = {"method": "ngram", "num_speculative_tokens": 3} | keys
    path.write_text(f"model: demo\nspeculative_config: {json.dumps(values)}\n", encoding="utf-8")
    return str(path)


def test_configurations_of_one_method_are_told_apart(tmp_path: Path) -> None:
    short, long = (write_yaml(tmp_path / f"{k}.yaml", num_speculative_tokens=k) for k in (3, 5))
    suffix = write_yaml(tmp_path / "suffix.yaml", method="suffix")
    found = configurations_from_files([short, long, suffix], [], "bench")
    assert [c.name for c in found] == ["ngram k=3", "ngram k=5", "suffix"]
    other = write_yaml(tmp_path / "other.yaml", max_ngram_size=4)
    with pytest.raises(ConfigError, match=r"config: expected files that differ .*, got ngram k=3 in both .* and .*"):
        configurations_from_files([short, other], [], "bench")


def test_a_benchmark_leaves_the_suffix_cache_file_alone(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "suffix.yaml", method="suffix", suffix_decoding_cache_file=str(tmp_path / "cache"))
    [configuration] = configurations_from_files([path], [], "bench")
    assert configuration.config.speculative == SpeculativeConfig("suffix", 3)


def test_bounds_do_not_look_at_the_drafts() -> None:
    [configuration] = configurations_by_name(["mtp"], ["--model", "demo"], "bench")
    bounds = with_bounds(configuration)
    assert [(b.name, b.config.speculative.accept_policy) for b in bounds] == [
        ("mtp", "normal"),
        ("mtp accept_all", "accept_all"),
        ("mtp reject_all", "reject_all"),
    ]


def test_a_record_has_the_keys_of_speculative_config_together() -> None:
    [configuration] = configurations_by_name(["mtp-ngram"], ["--model", "demo"], "bench")
    values = config_json(configuration.config)
    assert values["speculative_config"]["num_speculative_tokens"] == 5
    assert values["max_num_seqs"] == 32
    assert not any("." in name for name in values)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompts_are_different_and_repeatable(workload: str) -> None:
    encoder = PromptEncoder(
        load_tokenizer(configurations_by_name(["ngram"], ["--model", "demo"], "b")[0].config.model.path)
    )
    prompts = make_prompts(workload, 16, encoder)
    assert len({p.tobytes() for p in prompts}) == 16
    assert all(len(p) <= MAX_PROMPT_LEN for p in prompts)
    assert [p.tolist() for p in make_prompts(workload, 16, encoder)] == [p.tolist() for p in prompts]
    with pytest.raises(ConfigError, match=r"batch_sizes: expected at most \d+, the prompts of "):
        make_prompts(workload, 100_000, encoder)
