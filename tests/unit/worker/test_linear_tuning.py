"""How products go over memory: what is chosen and kept, that ranks agree on it, and that no bit depends on it."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.moe import moe_ffn
from fastdeploy_sd.ops.packing import pack_experts, pack_linear
from fastdeploy_sd.worker.autotune import linear_tuning, prefetch, row_blocks
from fastdeploy_sd.worker.autotune.linear_tuning import LinearTuning, tune_linear
from fastdeploy_sd.worker.autotune.prefetch import DISTANCES, ROWS, UNMEASURED, measure_distances, set_distances
from fastdeploy_sd.worker.autotune.row_blocks import BLOCK_BYTES, TILE_ROWS, Blocking, measure_blocking, set_blocking
from fastdeploy_sd.worker.autotune.timed_choice import clearly_best, was_quiet
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from tests.ops.backends import LEVELS, isa

MACHINE: dict[str, str | int] = {"cpu": "x", "num_threads": 2}
ALONE = RankGroup()
TUNED = LinearTuning(dict.fromkeys(ROWS, 2048) | {5: UNMEASURED}, Blocking(6, 1 << 20))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for fmt in LINEAR_FORMATS:
        set_distances(fmt, {32: UNMEASURED})
        set_blocking(fmt, Blocking())


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_no_bit_depends_on_distances(fmt: LinearFormat) -> None:
    """Also where the distance is longer than the weights are."""
    rng = np.random.default_rng(3)
    packed = pack_linear(rng.standard_normal((70, 300), np.float32), fmt)
    rows: list[np.ndarray] = [rng.standard_normal((m, 300), np.float32) for m in (1, 2, 5, 6, 12, 20)]
    for level in LEVELS:
        with isa(level):
            wanted = [linear(x, packed) for x in rows]
            for distance in (0, 64, 8192, 65536):
                set_distances(fmt, {32: distance})
                for x, want in zip(rows, wanted, strict=True):
                    np.testing.assert_array_equal(linear(x, packed), want)
            set_distances(fmt, {32: UNMEASURED})


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_no_bit_depends_on_blocks(fmt: LinearFormat) -> None:
    """Of linear over one and several blocks, and of experts with one row, a tile's and several tiles'."""
    rng = np.random.default_rng(3)
    packed = pack_linear(rng.standard_normal((70, 300), np.float32), fmt)
    gate_up = pack_experts(rng.standard_normal((5, 40, 70), np.float32), fmt)
    down = pack_experts(rng.standard_normal((5, 70, 20), np.float32), fmt)
    router = rng.standard_normal((5, 70), np.float32)

    def outputs() -> Iterator[np.ndarray]:
        for x in rows:
            yield linear(x, packed)
            yield moe_ffn(x[:, :70].copy(), router, gate_up, down, top_k=2, normalize=True, norm_min=1e-12)

    rows: list[np.ndarray] = [rng.standard_normal((m, 300), np.float32) for m in (1, 5, 13, 33, 230)]
    for level in LEVELS:
        with isa(level):
            wanted = list(outputs())
            for tile_rows, block_bytes in ((1, 0), (3, 1), (7, 1 << 30), (64, 4096)):
                set_blocking(fmt, Blocking(tile_rows, block_bytes))
                for got, want in zip(outputs(), wanted, strict=True):
                    np.testing.assert_array_equal(got, want, f"{level} {tile_rows} {block_bytes}")
            set_blocking(fmt, Blocking())


def test_the_least_time_wins_where_it_is_clearly_less() -> None:
    times = {UNMEASURED: [2.0, 1.0, 1.0], 0: [1.1, 1.2, 1.0], 2048: [0.99, 0.99, 3.0], 8192: [1.5, 1.5, 1.5]}

    def best(changes: dict[int, list[float]]) -> int:
        return clearly_best(times | changes, UNMEASURED, 1.03)

    assert best({}) == UNMEASURED
    assert best({8192: [9.0, 0.9, 0.9]}) == 8192
    assert best({0: [0.9, 0.5, 9.0]}) == 0
    # Once only: chance.
    assert best({0: [0.5, 1.2, 1.0]}) == UNMEASURED
    # Twice, and slower most of the time.
    assert best({0: [0.5, 0.5, 1.4, 1.4, 1.4, 1.4]}) == UNMEASURED
    assert was_quiet([1.0, 1.2, 3.0])
    assert not was_quiet([1.0, 1.3, 3.0])


def test_what_is_measured_is_a_choice_and_changes_nothing_yet() -> None:
    """However busy the machine is that runs this."""
    distances, _ = measure_distances("wint4", num_bytes=1 << 18)
    blocking, _ = measure_blocking("wint4", out_features=32)
    assert list(distances) == list(ROWS)
    assert set(distances.values()) <= {UNMEASURED, *DISTANCES}
    assert blocking.tile_rows in TILE_ROWS
    assert blocking.block_bytes in BLOCK_BYTES


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, as if the machine were quiet and TUNED best."""
    formats: list[str] = []

    def measure(fmt: LinearFormat) -> tuple[LinearTuning, bool]:
        formats.append(fmt)
        return TUNED, True

    monkeypatch.setattr(linear_tuning, "measure", measure)
    return formats


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, LinearTuning]:
    """Format -> what its products do."""
    formats: dict[str, LinearTuning] = {}
    monkeypatch.setattr(LinearTuning, "apply", lambda tuning, fmt: formats.update({fmt: tuning}))
    return formats


def test_what_was_measured_is_kept_for_the_machine(
    tmp_path: Path, measured: list[str], applied: dict[str, LinearTuning]
) -> None:
    for _ in range(2):
        tune_linear(["wint8", "wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
        assert applied == {"wint8": TUNED, "wint4": TUNED}
        applied.clear()
    assert measured == ["wint8", "wint4"]
    tune_linear(["wint4"], MACHINE | {"cpu": "y"}, tmp_path, ALONE, is_worth=True)
    assert measured == ["wint8", "wint4", "wint4"]
    assert len(list(tmp_path.iterdir())) == 3
    tune_linear(["wint4"], MACHINE | {"cpu": "z"}, tmp_path, ALONE, is_worth=False)
    assert applied["wint4"] == LinearTuning()
    assert len(measured) == len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("measured")
def test_without_a_folder_it_is_measured_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tune_linear(["wint4"], MACHINE, None, ALONE, is_worth=True)
    assert "not kept, as this user has no home folder" in caplog.text


def test_of_a_machine_that_was_disturbed_only_what_was_not_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice seems twice as quick in every turn, also in those that something ran beside."""
    quiet, disturbed = [2.0] * 6, [2.0, 3.0, 2.0, 3.0, 3.0, 3.0]

    def turns(of_own: list[list[float]]) -> Callable[..., dict[int, list[float]]]:
        own = iter(of_own)
        return lambda choices, *_: (
            {choice: [1.0] * 6 if choice == choices[2] else [9.0] * 6 for choice in choices} | {choices[0]: next(own)}
        )

    monkeypatch.setattr(prefetch, "take_turns", turns([quiet, disturbed] + [quiet] * (len(ROWS) - 2)))
    distances = dict.fromkeys(ROWS, DISTANCES[1]) | {ROWS[1]: UNMEASURED}
    assert measure_distances("wint4", num_bytes=1 << 18) == (distances, False)
    for own, blocking in (
        ([quiet, quiet], Blocking(TILE_ROWS[2], BLOCK_BYTES[2])),
        ([disturbed, quiet], Blocking(0, BLOCK_BYTES[2])),
        ([quiet, disturbed], Blocking(TILE_ROWS[2], 0)),
    ):
        monkeypatch.setattr(row_blocks, "take_turns", turns(own))
        assert measure_blocking("wint4", out_features=32) == (blocking, disturbed not in own)


def test_weights_that_are_measured_have_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is one page of zeros, which is always in the cache."""
    monkeypatch.setattr(row_blocks, "huge_pages", lambda num_bytes: np.full(num_bytes, 7, np.uint8))
    monkeypatch.setattr(row_blocks, "linear", lambda x, weight: seen.append(weight.data.any()))
    seen: list[bool] = []
    measure_blocking("wint4", out_features=32)
    assert seen
    assert not any(seen)


def test_what_was_measured_in_part_is_kept_for_a_day(
    tmp_path: Path, applied: dict[str, LinearTuning], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now, day, measured = 1e9, 24 * 3600, 0

    def measure(fmt: LinearFormat) -> tuple[LinearTuning, bool]:
        nonlocal measured
        measured += 1
        return TUNED, measured == 3

    monkeypatch.setattr(linear_tuning, "measure", measure)
    monkeypatch.setattr("fastdeploy_sd.worker.autotune.linear_tuning.time.time", lambda: now)
    # A clock that went back is no reason to wait; what was measured in full holds for good.
    for later, num_measured in ((0, 1), (day - 60, 1), (day, 2), (-day, 3), (900 * day, 3)):
        now = 1e9 + later
        tune_linear(["wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
        assert applied == {"wint4": TUNED}
        assert measured == num_measured
    assert caplog.text.count("tuned in part, as something else runs on this machine") == 2


def test_ranks_do_as_the_first_one_found(tmp_path: Path, measured: list[str], applied: dict[str, LinearTuning]) -> None:
    """Which alone measures."""
    said: list[int] = []

    def first_says(measure: Callable[[], int]) -> int:
        said.append(measure())
        return said[-1]

    first = RankGroup(rank=0, size=2, smallest=first_says)
    tune_linear(["wint8"], MACHINE, tmp_path, first, is_worth=True)
    assert measured == ["wint8"]
    assert applied.pop("wint8") == TUNED
    second = RankGroup(rank=1, size=2, smallest=lambda measure: min(said[0], measure()))
    tune_linear(["wint8"], MACHINE, None, second, is_worth=True)
    assert measured == ["wint8"]
    assert applied == {"wint8": TUNED}


def test_a_tuning_is_one_number() -> None:
    assert LinearTuning().code() == 0
    most = LinearTuning(dict.fromkeys(ROWS, DISTANCES[-1]), Blocking(TILE_ROWS[-1], BLOCK_BYTES[-1]))
    assert most.code() < 1 << 62
    pairs = itertools.product(ROWS, DISTANCES)
    one_by_one = [replace(TUNED, distances=dict(TUNED.distances) | {m: d}) for m, d in pairs]
    for tuning in (LinearTuning(), TUNED, most, *one_by_one):
        assert LinearTuning.of_code(tuning.code()) == tuning


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0}, {"bytes_ahead": {"1": 5}}, {"bytes_ahead": 7}, {"machine": 1},
        {"was_quiet": 1}, {"measured_at": None},
        {"tile_rows": 5}, {"tile_rows": None}, {"block_bytes": True}, {"block_bytes": "0"},
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_again(tmp_path: Path, measured: list[str], change: dict[str, Any]) -> None:
    tune_linear(["wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
    [path] = tmp_path.iterdir()
    good = json.loads(path.read_text())
    for text in (json.dumps(good | change), "{"):
        measured.clear()
        path.write_text(text)
        tune_linear(["wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
        assert measured == ["wint4"]
        assert json.loads(path.read_text()) | {"measured_at": 0} == good | {"measured_at": 0}


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"num_bytes: expected -1\.\.65536, got another number: 70000 bytes for 1 rows"
    ):
        set_distances("wint4", {1: 70000})
    with pytest.raises(ConfigError, match=r"num_rows: expected 1\.\.32"):
        set_distances("wint4", {40: 0})
    with pytest.raises(ConfigError, match=r"tile_rows: expected 0\.\.64, got another number"):
        set_blocking("wint4", Blocking(65))
    with pytest.raises(ConfigError, match=r"block_bytes: expected 0\.\.2\^30"):
        set_blocking("wint4", Blocking(0, -1))
