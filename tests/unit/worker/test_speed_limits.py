"""What is said of a machine's limits: what follows from bandwidth and peak, nothing where one of them is unknown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.ops.roofline import Roofline, measure_roofline
from fastdeploy_sd.worker.autotune.speed_limits import bytes_per_step, describe_engines, describe_limits


def test_rows_are_free_until_arithmetic_takes_as_long_as_reading() -> None:
    roofline = Roofline(10e9, {"bfloat16": 105e9, "wint8": 400e9, "wint4": 400e9, "float32": 1e9})
    assert roofline.free_rows("bfloat16") == 10
    # One byte and 4.5 bits, and with them the scales of groups of 128.
    assert roofline.free_rows("wint8") == 20
    assert roofline.free_rows("wint4") == 11
    assert roofline.free_rows("float32") == 1, "one row is always computed"
    assert roofline.steps_per_s(2_500_000_000) == 4
    assert Roofline(10e9, {"bfloat16": 0.0}).free_rows("bfloat16") is None
    assert Roofline(0.0, {"wint8": 1.0}).free_rows("wint8") is None


@pytest.mark.parametrize(
    ("model", "roofline", "line"),
    [
        (
            "qwen3-tiny",
            Roofline(12.3456e9, {"bfloat16": 435e9}),
            r"memory reads 12\.3 GB/s, at most \d+ steps/s if no cache holds the weights; bfloat16 arithmetic reaches"
            r" 435 GOP/s; memory limits steps of up to 35 rows, arithmetic larger ones and prompts",
        ),
        # Which experts are read depends on the tokens.
        (
            "qwen3_moe-tiny",
            Roofline(12e9, {"bfloat16": 0.0}),
            r"memory reads 12 GB/s; bfloat16 arithmetic reaches an unknown number of GOP/s",
        ),
        (
            "qwen3-tiny",
            Roofline(0.0, {"bfloat16": 9e11}),
            r"memory reads an unknown number of GB/s; bfloat16 arithmetic reaches 900 GOP/s",
        ),
    ],
)
def test_the_line_of_a_start(golden_dir: Path, model: str, roofline: Roofline, line: str) -> None:
    path = golden_dir / model
    text = describe_limits(roofline, bytes_per_step(Config(ModelConfig(str(path))), Checkpoint(path)))
    assert re.fullmatch(line, text), text


def test_engines_are_slower_than_one_until_each_has_rows_enough() -> None:
    """Times from the two limits: the one of D engines is longer below D times the free rows, and equal from there."""
    roofline, num_engines = Roofline(10e9, {"bfloat16": 105e9}), 4
    text = describe_engines(roofline, num_engines)
    assert "with fewer than about 40 rows in all" in text
    assert "4 times as fast up to 10 rows" in text

    def step_s(rows: float, share: float) -> float:
        """Seconds of a step over 1e9 weights on a share of the machine."""
        return max(2e9 / (10e9 * share), 2e9 * rows / (105e9 * share))

    gains = {rows: step_s(rows / num_engines, 1 / num_engines) / step_s(rows, 1) for rows in (1, 10, 20, 39, 42, 200)}
    assert gains[1] == gains[10] == pytest.approx(4)
    assert gains[20] == pytest.approx(2, rel=0.06)
    assert gains[39] > 1
    assert gains[42] == gains[200] == pytest.approx(1)
    assert "for few requests that is slower" in describe_engines(Roofline(10e9, {"bfloat16": 0.0}), 2)


def test_the_machine_is_measured() -> None:
    roofline = measure_roofline(("bfloat16", "wint4"), 4 << 20, 1)
    assert roofline.read_bytes_per_s > 0
    assert [peak > 0 for peak in roofline.peaks.values()] == [library.isa() != "scalar"] * 2
