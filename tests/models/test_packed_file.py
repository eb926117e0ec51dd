"""The file of packed weights: damage is found, and what cannot be written is not left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.models.weights.packed_file import PackedFile, PackedFileError, write_packed_file
from tests.models.packed_weights import damage_byte, load, only_file, warnings_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (0, "expected a file of packed weights"),
        (8, "expected version"),
        (12, "expected a header with its checksum"),
        (20, "expected a header with its checksum"),
        (40, "expected a header with its checksum"),
        (-1, "expected the checksums of its bytes"),
    ],
)
def test_a_damaged_byte_is_found(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, position: int, text: str
) -> None:
    want, _ = load(folder, model)
    path = only_file(folder)
    whole = path.read_bytes()
    damage_byte(path, position)
    assert load(folder, model) == (want, True)
    (warning,) = warnings_of(caplog)
    assert text in warning
    assert str(path) in warning
    assert path.read_bytes() == whole, "written anew"


def test_every_byte_that_counts_is_checked(tmp_path: pathlib.Path) -> None:
    """Only the padding between matrices may differ."""
    path = tmp_path / "f"
    matrices = {"a": np.arange(200, dtype=np.uint8), "b": np.arange(5, dtype=np.uint8)}
    write_packed_file(path, {"k": 1}, matrices, 0o600)
    size, begins = path.stat().st_size, [data.ctypes.data for data in PackedFile(path, {"k": 1}).matrices.values()]
    distance = begins[1] - begins[0]
    counted = [*range(300), size - 5, size - 1, *range(size - 5 - distance, size - 5 - distance + 200)]
    whole = path.read_bytes()
    header_end = 28 + int.from_bytes(whole[12:20], "little")
    for position in {p for p in counted if p < header_end or p >= size - 5 - distance}:
        damage_byte(path, position)
        with pytest.raises(PackedFileError):
            PackedFile(path, {"k": 1})
        path.write_bytes(whole)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_packed_again(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, keep: float
) -> None:
    want, _ = load(folder, model)
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert load(folder, model) == (want, True)
    assert len(warnings_of(caplog)) == 1
    assert not load(folder, model)[1]


def test_the_file_is_no_more_readable_than_the_checkpoint(folder: pathlib.Path, model: pathlib.Path) -> None:
    (model / "model.safetensors").chmod(0o640)
    before = os.umask(0o022)
    try:
        load(folder, model)
    finally:
        os.umask(before)
    assert only_file(folder).stat().st_mode & 0o777 == 0o640


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        yield


def test_a_full_disk_costs_the_file_only(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, _ = load(None, model)
    with full_disk(monkeypatch):
        assert load(folder, model) == (want, True)
    assert "No space left on device" in warnings_of(caplog)[0]
    assert [path.suffix for path in folder.iterdir()] == [".lock"], "nothing half written is left"
