"""`bench adapters`: every number of adapters is measured, and compared with the layers' own products."""

from __future__ import annotations

import json

import pytest

from benchmarks import adapters, kernels
from benchmarks.__main__ import main
from benchmarks.adapters import AdapterCost, adapter_table
from benchmarks.hardware import MemorySpeed
from benchmarks.shapes import SHAPES


def test_a_row_of_the_table_is_a_number_of_adapters() -> None:
    costs = [AdapterCost(1, 8, 20.0, 30.0, 1000.0)]
    assert adapter_table(costs).splitlines()[2:] == ["| 1 | 8 | 20 | 30 | 1000 | 5.0% |"]


def test_the_command_measures_every_number_of_adapters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    monkeypatch.setattr(adapters, "SHAPES", {"qwen3-0.6b": small})
    monkeypatch.setattr(adapters, "WORKING_SET_BYTES", 1 << 18)
    monkeypatch.setattr(kernels, "measure_memory", lambda: MemorySpeed(1.0, 0.0))
    monkeypatch.setattr(kernels, "dot_peak", lambda fmt: 1e9)
    assert main(["adapters", "--adapters", "0", "2", "--rows", "3", "--rank", "4", "--rounds", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(cost["num_adapters"], cost["num_rows"]) for cost in record["adapters"]] == [(0, 3), (2, 3)]
    assert all(min(cost["shrink"], cost["expand"], cost["linear"]) > 0 for cost in record["adapters"])
