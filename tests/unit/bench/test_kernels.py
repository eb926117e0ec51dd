"""The cost of matrix products by themselves: what is measured, what it is compared with, and the table."""

from __future__ import annotations

import json

import pytest

from fastdeploy_sd.bench import kernels
from fastdeploy_sd.bench.__main__ import main
from fastdeploy_sd.bench.hardware import MemorySpeed, dot_peak
from fastdeploy_sd.bench.kernels import FORMATS, LinearCost, linear_table, measure_linear, read_shape
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.reference.linear import LinearFormat
from tests.ops.backends import isa

BANDWIDTH, PEAK = 40e9, 900e9


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_memory", lambda: MemorySpeed(BANDWIDTH / 1e9, 0.0))
    monkeypatch.setattr(kernels, "dot_peak", lambda _: PEAK)
    monkeypatch.setattr(kernels, "WORKING_SET_BYTES", 1 << 18)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.usefixtures("known_machine")
def test_a_product_is_counted_in_bytes_and_operations(fmt: LinearFormat) -> None:
    # More columns than are packed from random weights, and more than one matrix.
    costs = measure_linear(fmt, 256, 1504, (1, 5), 3, 1 << 20)
    assert [cost.num_rows for cost in costs] == [1, 5]
    bits = {"bfloat16": 16, "wint8": 8.25, "wint4": 4.25}[fmt]  # with the scale of a group of 128
    for cost in costs:
        seconds = cost.us / 1e6
        assert cost.gop_per_s == pytest.approx(2 * cost.num_rows * 256 * 1504 / seconds / 1e9)
        assert cost.gb_per_s == pytest.approx(256 * 1504 * bits / 8 / seconds / 1e9)
        assert cost.bandwidth_share == pytest.approx(cost.gb_per_s * 1e9 / BANDWIDTH)
        assert cost.peak_share == pytest.approx(cost.gop_per_s * 1e9 / PEAK)


@pytest.mark.usefixtures("known_machine")
def test_the_command_prints_every_shape_and_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["kernels", "--formats", "wint4", "--shapes", "128x64", "64x32", "--rows", "1", "2", "--rounds", "1"]
    assert main(argv) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(c["in_features"], c["num_rows"]) for c in record["linear"]] == [(128, 1), (128, 2), (64, 1), (64, 2)]


def test_table() -> None:
    one = LinearCost("wint4", 1024, 4096, 1, 50.0, 44.6, 167.8, 0.912, 0.182)
    five = LinearCost("wint4", 1024, 4096, 5, 60.0, 37.1, 699.1, 0.76, None)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in linear_table([one, five]).splitlines()[2:]]
    assert cells == [
        ["wint4", "1024 x 4096", "1", "50.0", "1.00", "44.6", "91%", "168", "18%"],
        ["wint4", "1024 x 4096", "5", "60.0", "1.20", "37.1", "76%", "699", "-"],
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shapes", "1024"], "shapes: expected KxN such as 1024x4096, got '1024'"),
        (["--shapes", "0x64"], "shapes: expected KxN such as 1024x4096, got '0x64'"),
        (["--rows", "0"], "rows: expected at least 1, got 0"),
        (["--rounds", "0"], "rounds: expected at least 1, got 0"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_shape_is_inputs_by_outputs() -> None:
    assert read_shape("1024x4096") == (1024, 4096)
    with pytest.raises(ConfigError, match="got '1x2x3'"):
        read_shape("1x2x3")


@pytest.mark.parametrize("level", library.available_isas())
def test_the_instruction_peak_is_plausible(level: str) -> None:
    with isa(level):
        peaks = [dot_peak(fmt) for fmt in FORMATS]
    if level == "scalar":
        assert peaks == [0.0, 0.0, 0.0]
    else:
        assert all(1e8 < peak < 1e15 for peak in peaks)
