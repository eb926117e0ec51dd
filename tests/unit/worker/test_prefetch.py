"""Distances of prefetching: what is chosen, that it is kept, and that no bit depends on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.runtime import library
from fastdeploy_sd.worker import prefetch
from fastdeploy_sd.worker.prefetch import DISTANCES, ROWS, UNMEASURED, best_distance, set_distances, tune_prefetch
from tests.ops.backends import isa

MACHINE: dict[str, str | int] = {"cpu": "x", "num_threads": 2}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for fmt in LINEAR_FORMATS:
        set_distances(fmt, {32: UNMEASURED})


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_no_bit_depends_on_them(fmt: LinearFormat) -> None:
    """Also where the distance is longer than the weights are."""
    rng = np.random.default_rng(3)
    packed = pack_linear(rng.standard_normal((70, 300), np.float32), fmt)
    rows: list[np.ndarray] = [rng.standard_normal((m, 300), np.float32) for m in (1, 2, 5, 6, 12, 20)]
    for level in library.available_isas():
        with isa(level):
            wanted = [linear(x, packed) for x in rows]
            for distance in (0, 64, 8192, 65536):
                set_distances(fmt, {32: distance})
                for x, want in zip(rows, wanted, strict=True):
                    np.testing.assert_array_equal(linear(x, packed), want)
            set_distances(fmt, {32: UNMEASURED})


def test_the_least_time_wins_where_it_is_clearly_less() -> None:
    times = {UNMEASURED: [2.0, 1.0, 1.0], 0: [1.1, 1.2, 1.0], 2048: [0.99, 0.99, 3.0], 8192: [1.5, 1.5, 1.5]}
    assert best_distance(times) == UNMEASURED
    assert best_distance(times | {8192: [9.0, 0.9, 0.9]}) == 8192
    assert best_distance(times | {0: [0.9, 0.5, 9.0]}) == 0
    # Once only: chance.
    assert best_distance(times | {0: [0.5, 1.2, 1.0]}) == UNMEASURED


def test_what_was_measured_is_kept_for_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs this."""
    measured: list[LinearFormat] = []
    measure = prefetch.measure

    def on_a_quiet_machine(fmt: LinearFormat, num_bytes: int) -> tuple[prefetch.Distances, bool]:
        measured.append(fmt)
        return measure(fmt, num_bytes)[0], True

    monkeypatch.setattr(prefetch, "measure", on_a_quiet_machine)
    for _ in range(2):
        tune_prefetch(["wint8", "wint4"], MACHINE, tmp_path, num_bytes=1 << 20)
    assert measured == ["wint8", "wint4"]
    tune_prefetch(["wint4"], MACHINE | {"cpu": "y"}, tmp_path, num_bytes=1 << 20)
    assert measured == ["wint8", "wint4", "wint4"]
    files = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert len(files) == 3
    for values in files:
        assert list(values["bytes_ahead"]) == [str(m) for m in ROWS]
        assert set(values["bytes_ahead"].values()) <= {UNMEASURED, *DISTANCES}


def test_without_a_folder_they_are_measured_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(prefetch, "measure", lambda fmt, num_bytes: (dict.fromkeys(ROWS, UNMEASURED), True))
    tune_prefetch(["wint4"], MACHINE, None)
    assert "not kept, as this user has no home folder" in caplog.text


@pytest.mark.parametrize("damage", ["{", '"version": 0', '"bytes_ahead": {"1": 5}', '"bytes_ahead": 7', '"machine": 1'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    name = prefetch._name("wint4", MACHINE)
    good = {"version": 1, "machine": MACHINE, "bytes_ahead": dict.fromkeys(map(str, ROWS), 0)}
    (tmp_path / name).write_text(json.dumps(good))
    tune_prefetch(["wint4"], MACHINE, tmp_path, num_bytes=1 << 16)
    assert caplog.text == ""
    (tmp_path / name).write_text("{" if damage == "{" else json.dumps(good | json.loads(f"{{{damage}}}")))
    tune_prefetch(["wint4"], MACHINE, tmp_path, num_bytes=1 << 16)
    assert caplog.text.count("prefetch of wint4 weights: measured in") == 1


def test_wrong_distances_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"num_bytes: expected -1\.\.65536, got another number: 70000 bytes for 1 rows"
    ):
        set_distances("wint4", {1: 70000})
    with pytest.raises(ConfigError, match=r"num_rows: expected 1\.\.32"):
        set_distances("wint4", {40: 0})
