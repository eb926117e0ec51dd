"""The cost of matrix products by themselves: what is measured, and what it is compared with."""

from __future__ import annotations

import json

import pytest

from benchmarks import kernels
from benchmarks.__main__ import main
from benchmarks.hardware import MemorySpeed
from benchmarks.kernels import linear_table, measure_linear


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_memory", lambda: MemorySpeed(0.004096, 0.0))
    monkeypatch.setattr(kernels, "dot_peak", lambda fmt: 0.0 if fmt == "wint8" else 16.384e6)
    monkeypatch.setattr(kernels, "WORKING_SET_BYTES", 1 << 18)


@pytest.mark.usefixtures("known_machine", "ticking")
def test_a_product_is_counted_in_bytes_and_operations() -> None:
    # 2 MB and 1 MB of weights, so two and three matrices in a run, which takes a second.
    costs = measure_linear("bfloat16", 500, 2048, (1, 4), 3, 2_048_001)
    assert linear_table([*costs, *measure_linear("wint8", 512, 1984, (1,), 3, 2_100_000)]).splitlines()[2:] == [
        "| bfloat16 | 500 x 2048 | 1 | 500000.0 | 1.00 | 0.0 | 100% | 0 | 25% |",
        "| bfloat16 | 500 x 2048 | 4 | 500000.0 | 1.00 | 0.0 | 100% | 0 | 100% |",
        "| wint8 | 512 x 1984 | 1 | 333333.3 | 1.00 | 0.0 | 77% | 0 | - |",
    ]
    assert [cost.gop_per_s for cost in costs] == pytest.approx([0.004096, 0.016384])


@pytest.mark.usefixtures("known_machine")
def test_the_command_prints_every_shape_and_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["kernels", "--formats", "wint4", "--shapes", "128x64", "64x32", "--rows", "1", "2", "--rounds", "1"]
    assert main(argv) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(c["in_features"], c["num_rows"]) for c in record["linear"]] == [(128, 1), (128, 2), (64, 1), (64, 2)]
