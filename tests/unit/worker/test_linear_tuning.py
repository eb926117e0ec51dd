"""How products go over memory: what is chosen and kept, that ranks agree on it, and that no bit depends on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.moe import moe_ffn
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.worker.autotune import linear_tuning
from fastdeploy_sd.worker.autotune.linear_tuning import (
    DEFAULT,
    ROWS,
    TUNABLES,
    UNMEASURED,
    Tunable,
    Tuning,
    clearly_best,
    code_of,
    measure,
    measured,
    of_code,
    set_blocking,
    set_distances,
    tune_linear,
    was_quiet,
)
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from tests.ops.backends import LEVELS, isa
from tests.ops.expert_model import pack_experts

MACHINE: dict[str, str | int] = {"cpu": "x", "num_threads": 2}
ALONE = RankGroup()
TUNED: Tuning = {
    **{f"prefetch_bytes_{num_rows}": UNMEASURED if num_rows == 5 else 2048 for num_rows in ROWS},
    "tile_rows": 6,
    "block_bytes": 1 << 20,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for fmt in LINEAR_FORMATS:
        set_distances(fmt, {32: UNMEASURED})
        set_blocking(fmt)


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
                set_blocking(fmt, tile_rows, block_bytes)
                for got, want in zip(outputs(), wanted, strict=True):
                    np.testing.assert_array_equal(got, want, f"{level} {tile_rows} {block_bytes}")
            set_blocking(fmt)


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


def test_what_is_measured_is_a_value_and_changes_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs this."""
    used: list[Tuning] = []
    monkeypatch.setattr(linear_tuning, "apply", lambda _, tuning: used.append(tuning))
    tuning, _ = measure("wint4", num_bytes=1 << 18)
    assert tuning.keys() == DEFAULT.keys()
    assert all(tuning[number.key] in number.values for number in TUNABLES)
    assert used[-1] == DEFAULT


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, as if the machine were quiet and TUNED best."""
    formats: list[str] = []

    def measure(fmt: LinearFormat) -> tuple[Tuning, bool]:
        formats.append(fmt)
        return TUNED, True

    monkeypatch.setattr(linear_tuning, "measure", measure)
    return formats


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tuning]:
    """Format -> what its products do."""
    formats: dict[str, Tuning] = {}
    monkeypatch.setattr(linear_tuning, "apply", lambda fmt, tuning: formats.update({fmt: tuning}))
    return formats


def test_what_was_measured_is_kept_for_the_machine(
    tmp_path: Path, formats: list[str], applied: dict[str, Tuning]
) -> None:
    for _ in range(2):
        tune_linear(["wint8", "wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
        assert applied == {"wint8": TUNED, "wint4": TUNED}
        applied.clear()
    assert formats == ["wint8", "wint4"]
    tune_linear(["wint4"], MACHINE | {"cpu": "y"}, tmp_path, ALONE, is_worth=True)
    assert formats == ["wint8", "wint4", "wint4"]
    assert len(list(tmp_path.iterdir())) == 3
    tune_linear(["wint4"], MACHINE | {"cpu": "z"}, tmp_path, ALONE, is_worth=False)
    assert applied["wint4"] == DEFAULT
    assert len(formats) == len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("formats")
def test_without_a_folder_it_is_measured_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tune_linear(["wint4"], MACHINE, None, ALONE, is_worth=True)
    assert "not kept, as this user has no home folder" in caplog.text


def test_of_a_machine_that_was_disturbed_only_what_was_not_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value seems twice as fast in every turn, also in those that something ran beside."""
    quiet, disturbed = [2.0] * 6, [2.0, 3.0, 2.0, 3.0, 3.0, 3.0]
    best = {number.key: number.values[2] for number in TUNABLES}
    for number in (TUNABLES[1], *TUNABLES[-2:]):
        measured_ones = iter(TUNABLES)

        def turns(
            values: Sequence[int], *_: object, busy: Tunable = number, ones: Iterator[Tunable] = measured_ones
        ) -> dict[int, list[float]]:
            own = disturbed if next(ones) is busy else quiet
            return {value: [1.0] * 6 if value == values[2] else [9.0] * 6 for value in values} | {values[0]: own}

        monkeypatch.setattr(linear_tuning, "take_turns", turns)
        assert measure("wint4", num_bytes=1 << 18) == (best | {number.key: number.values[0]}, False)


def test_numbers_are_measured_with_those_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows have the same distance, as a product may be tiles of fewer; blocks have the best tiles."""
    seen: dict[tuple[str, int], Tuning] = {}
    monkeypatch.setattr(linear_tuning, "apply", lambda _, tuning: used.append(tuning))
    used: list[Tuning] = []

    def best(number: Tunable, use: Callable[[int], object], _: object) -> tuple[int, bool]:
        for value in number.values:
            use(value)
            seen[number.key, value] = used[-1]
        return number.values[1], True

    monkeypatch.setattr(linear_tuning, "measured", best)
    assert measure("wint4", num_bytes=1 << 18) == ({number.key: number.values[1] for number in TUNABLES}, True)
    distances = {f"prefetch_bytes_{num_rows}": 2048 for num_rows in (1, 2, 3)}
    assert seen["prefetch_bytes_3", 2048] == {**DEFAULT, **distances}
    assert seen["tile_rows", 6] == {**DEFAULT, "tile_rows": 6}
    assert seen["block_bytes", 1 << 20] == {**DEFAULT, "tile_rows": 3, "block_bytes": 1 << 20}


def test_a_value_is_used_before_every_run() -> None:
    events: list[object] = []
    number = Tunable("n", (0, 5), gain=1.02, num_rows=1)
    assert measured(number, events.append, lambda: events.append("run"))[0] in (0, 5)
    assert events == [0, "run", 5, "run"] * 6


def test_weights_that_are_measured_have_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written is one page of zeros, which is always in the cache."""
    monkeypatch.setattr(linear_tuning, "huge_pages", lambda num_bytes: np.full(num_bytes, 7, np.uint8))
    monkeypatch.setattr(linear_tuning, "linear", lambda x, weight: seen.append(weight.data.any()))
    seen: list[bool] = []
    measure("wint4", num_bytes=1 << 18)
    assert seen
    assert not any(seen)


def test_what_was_measured_in_part_is_kept_for_a_day(
    tmp_path: Path, applied: dict[str, Tuning], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now, day, num_measured = 1e9, 24 * 3600, 0

    def measure(fmt: LinearFormat) -> tuple[Tuning, bool]:
        nonlocal num_measured
        num_measured += 1
        return TUNED, num_measured == 3

    monkeypatch.setattr(linear_tuning, "measure", measure)
    monkeypatch.setattr("fastdeploy_sd.worker.autotune.linear_tuning.time.time", lambda: now)
    # A clock that went back is no reason to wait; what was measured in full holds for good.
    for later, expected in ((0, 1), (day - 60, 1), (day, 2), (-day, 3), (900 * day, 3)):
        now = 1e9 + later
        tune_linear(["wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
        assert applied == {"wint4": TUNED}
        assert num_measured == expected
    assert caplog.text.count("tuned in part, as something else runs on this machine") == 2


def test_ranks_do_as_the_first_one_found(tmp_path: Path, formats: list[str], applied: dict[str, Tuning]) -> None:
    """Which alone measures."""
    said: list[int] = []

    def first_says(measure: Callable[[], int]) -> int:
        said.append(measure())
        return said[-1]

    first = RankGroup(rank=0, size=2, smallest=first_says)
    tune_linear(["wint8"], MACHINE, tmp_path, first, is_worth=True)
    assert formats == ["wint8"]
    assert applied.pop("wint8") == TUNED
    second = RankGroup(rank=1, size=2, smallest=lambda measure: min(said[0], measure()))
    tune_linear(["wint8"], MACHINE, None, second, is_worth=True)
    assert formats == ["wint8"]
    assert applied == {"wint8": TUNED}


def test_a_tuning_is_one_number() -> None:
    assert code_of(DEFAULT) == 0
    most = {number.key: number.values[-1] for number in TUNABLES}
    assert code_of(most) < 1 << 62
    one_by_one = [{**TUNED, number.key: value} for number in TUNABLES for value in number.values]
    for tuning in (DEFAULT, TUNED, most, *one_by_one):
        assert of_code(code_of(tuning)) == tuning


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0}, {"values": {"tile_rows": 6}}, {"values": 7}, {"machine": 1},
        {"was_quiet": 1}, {"measured_at": None}, {"values": {**TUNED, "prefetch_bytes_1": 5}},
        {"values": {**TUNED, "tile_rows": 5}}, {"values": {**TUNED, "tile_rows": None}},
        {"values": {**TUNED, "block_bytes": True}}, {"values": {**TUNED, "block_bytes": "0"}},
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_again(tmp_path: Path, formats: list[str], change: dict[str, Any]) -> None:
    tune_linear(["wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
    [path] = tmp_path.iterdir()
    good = json.loads(path.read_text())
    for text in (json.dumps(good | change), "{"):
        formats.clear()
        path.write_text(text)
        tune_linear(["wint4"], MACHINE, tmp_path, ALONE, is_worth=True)
        assert formats == ["wint4"]
        assert json.loads(path.read_text()) | {"measured_at": 0} == good | {"measured_at": 0}


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"num_bytes: expected -1\.\.65536, got another number: 70000 bytes for 1 rows"
    ):
        set_distances("wint4", {1: 70000})
    with pytest.raises(ConfigError, match=r"num_rows: expected 1\.\.32"):
        set_distances("wint4", {40: 0})
    with pytest.raises(ConfigError, match=r"tile_rows: expected 0\.\.64, got another number"):
        set_blocking("wint4", 65)
    with pytest.raises(ConfigError, match=r"block_bytes: expected 0\.\.2\^30"):
        set_blocking("wint4", 0, -1)
