"""`bench costs` on the bundled model: the file it writes, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import costs
from benchmarks.costs import costs_tables
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.profile import CostProfile, DraftSample, StepSample


def test_a_profile_of_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "costs.json"
    options = ["--model", "demo", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    small = ["--max-num-seqs", "2", "--max-model-len", "256", "--budget-ms", "100"]
    assert costs.main([*options, *small, "--out", str(path)]) == 0
    profile = CostProfile.load(path)
    assert capsys.readouterr().out.startswith(costs_tables(profile))
    assert {d.method for d in profile.drafts} <= {"ngram", "suffix"}  # as far as there was time
    assert profile.machine["ranks"] == 1
    with pytest.raises(ConfigError, match="kv_cache_memory_gb: expected room for a request and its drafts, got less"):
        costs.main([*options, "--num-gpu-blocks-override", "1", "--out", str(tmp_path / "none.json")])
    assert not (tmp_path / "none.json").exists()


def test_tables_compare_with_one_row_of_one_request() -> None:
    steps = (StepSample(64, 0, 0, 8.0), StepSample(1, 1, 64, 0.5), StepSample(4, 1, 64, 0.6))
    text = costs_tables(CostProfile({}, {}, steps, (DraftSample("mtp", 1, 3, 64, 0.25),)))
    lines = text.splitlines()
    assert lines[2:5] == [
        "| 0 | 64 | 0 | 8.000 | 16.00 |",
        "| 1 | 1 | 64 | 0.500 | 1.00 |",
        "| 1 | 4 | 64 | 0.600 | 1.20 |",
    ]
    assert lines[-1] == "| mtp | 1 | 3 | 0.250 | 0.50 |"
