"""Records: their files, the revision they name, and their table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offline import results_table
from benchmarks.record import Record, percentiles, revision
from fastdeploy_sd.errors import ConfigError


def make_record(
    rate: float,
    *,
    method: str = "naive",
    quantization: str | dict[str, str] | None = None,
    batch: int = 1,
) -> Record:
    name = f"{quantization}-{method}-{batch}-{rate}"
    metrics: dict[str, Any] = {
        "decode_tokens_per_s": rate,
        "step_ms": {"p50": 1000 / rate, "p90": 1100 / rate, "p99": 1200 / rate},
        "ttft_ms": {"p50": 50.0, "p90": 60.0, "p99": 70.0},
        "prefill_tokens_per_s": 1000.0,
        "mean_output_len": 1.0 if method == "naive" else 2.5,
        "acceptance_rate": None if method == "naive" else 0.5,
        "weights_gb_per_s": 30.0,
        "read_gb_per_s": 40.0,
    }
    repeats = [{**metrics, "decode_tokens_per_s": rate * f} for f in (0.9, 1.0, 1.1)]
    config: dict[str, Any] = {"model": "models/m", "dtype": "bfloat16", "quantization": quantization}
    workload = {"batch": batch, "prompt_len": 8, "output_len": 8}
    config["speculative_config"] = {"method": method}
    return Record(
        kind="offline", name=name, config=config, hardware={}, workload=workload, metrics=metrics, repeats=repeats
    )


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_table_is_ordered_and_compares_with_naive() -> None:
    records = [
        make_record(20, quantization="wint8"),
        make_record(25, method="oracle"),
        make_record(80, batch=8),
        make_record(10),
    ]
    table = rows(results_table(records))
    assert [row[1:7] for row in table] == [
        ["bfloat16", "1", "naive", "10.0", "1.00x", "1.00"],
        ["bfloat16", "1", "oracle", "25.0", "2.50x", "2.50"],
        ["bfloat16", "8", "naive", "80.0", "1.00x", "1.00"],
        ["wint8", "1", "naive", "20.0", "1.00x", "1.00"],
    ]
    assert table[0][0] == "m"
    assert table[0][-3:] == ["30.0", "40.0", "75%"]


def test_formats_of_a_map_come_last_and_have_a_name() -> None:
    mix = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
    records = [make_record(20, quantization=mix), make_record(25, quantization="wint4")]
    assert [row[1] for row in rows(results_table(records))] == ["wint4", "wint8-moe_wint4-head_wint8"]


def test_table_without_a_naive_record_or_weight_bytes() -> None:
    record = make_record(25, method="oracle")
    record = dataclasses.replace(record, metrics={**record.metrics, "weights_gb_per_s": None})
    [row] = rows(results_table([record]))
    assert row[5] == "-"
    assert row[-3:] == ["-", "40.0", "-"]


def test_record_survives_its_file(tmp_path: Path) -> None:
    record = make_record(10)
    path = record.save(tmp_path / "new")
    assert Record.load(path) == record
    assert Record.load_all(tmp_path / "new") == [record]


def test_file_that_is_no_record(tmp_path: Path) -> None:
    path = make_record(10).save(tmp_path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "schema_version": 99}))
    with pytest.raises(ConfigError, match=r"record: expected schema_version 2, got 99"):
        Record.load(path)
    path.write_text(json.dumps({**values, "surplus": 1}))
    with pytest.raises(ConfigError, match=r"record: expected the fields .*surplus"):
        Record.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"record: expected a readable JSON file"):
        Record.load(path)
    with pytest.raises(ConfigError, match=r"records: expected \*\.json files"):
        Record.load_all(tmp_path / "empty")


def test_percentiles() -> None:
    assert percentiles([]) is None
    assert percentiles([1.0, 2.0, 3.0]) == pytest.approx({"p50": 2.0, "p90": 2.8, "p99": 2.98})


def test_every_state_of_the_sources_has_a_revision_of_its_own(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert revision(tmp_path) is None
    git("init")
    assert revision(tmp_path) is None
    source = tmp_path / "custom_ops" / "a.cc"
    source.parent.mkdir()
    source.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = revision(tmp_path)
    assert clean is not None
    assert clean.isalnum()
    (tmp_path / "custom_ops" / "record.json").write_text("{}")
    assert revision(tmp_path) == clean, "a file that is no source"
    seen = [clean]
    for text in ("2", "3"):
        source.write_text(text)
        seen.append(str(revision(tmp_path)))
    new = source.with_name("b.cc")
    for text in ("4", "5"):
        new.write_text(text)
        seen.append(str(revision(tmp_path)))
    assert len(set(seen)) == len(seen)
    assert all(name.startswith(f"{clean}-dirty-") for name in seen[1:])
    source.write_text("1")
    new.unlink()
    assert revision(tmp_path) == clean
