"""The safetensors reader uses nothing that it has not checked."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.mapped_file import SAMPLE_BYTES
from fastdeploy_sd.models.weights.safetensors import SafetensorsFile


def write(path: pathlib.Path, header: Any, data: bytes, length: int | None = None) -> pathlib.Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if not isinstance(header, bytes):
        text += b" " * (-len(text) % 8)  # as writers do
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_tensors_without_copying(tmp_path: pathlib.Path) -> None:
    data = np.array([1.0, 2.0], np.float32).tobytes() + np.array([0x3F80], np.uint16).tobytes()
    header = {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", [1, 1], [8, 10])}
    file = SafetensorsFile(write(tmp_path / "m.safetensors", header, data))
    np.testing.assert_array_equal(file.tensor("a"), [1.0, 2.0])
    np.testing.assert_array_equal(file.tensor("b"), [[0x3F80]])
    assert not file.tensor("a").flags.writeable
    assert file.metadata == {"format": "pt"}
    with pytest.raises(CheckpointError, match="expected a tensor named 'c'"):
        file.tensor("c")


def test_a_header_of_odd_length_still_gives_aligned_tensors(tmp_path: pathlib.Path) -> None:
    header = json.dumps({"a": entry()}).encode()
    for padding in range(4):
        text = header + b" " * padding
        file = SafetensorsFile(write(tmp_path / "m.safetensors", text, np.array([1.0, 2.0], np.float32).tobytes()))
        assert file.tensor("a").flags.aligned
        np.testing.assert_array_equal(file.tensor("a"), [1.0, 2.0])


def test_samples_tell_files_of_one_header_size_and_time_apart(tmp_path: pathlib.Path) -> None:
    """As two trainings of one base in images that give every file the same time."""
    sizes = {"large": 3 * SAMPLE_BYTES, "norm": 100, "empty": 0}
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
    header = {name: entry("U8", [size], [ends[name] - size, ends[name]]) for name, size in sizes.items()}

    def identity(changed: int | None) -> dict[str, Any]:
        data = bytearray(sum(sizes.values()))
        if changed is not None:
            data[changed] = 1
        path = write(tmp_path / "m.safetensors", header, bytes(data))
        os.utime(path, ns=(0, 0))
        return SafetensorsFile(path).identity()

    large, norm = sizes["large"], sizes["norm"]
    seen = [None, SAMPLE_BYTES, large // 2, 2 * SAMPLE_BYTES - 1, large, large + norm // 2, large + norm - 1]
    identities = [identity(changed) for changed in seen]
    assert len({json.dumps(i) for i in identities}) == len(seen)
    assert len({i["samples"] for i in identities}) == len(seen)
    assert identity(None) == identities[0]


LIES = {
    "header longer than the file": ({"a": entry()}, b"\0" * 8, 2**63),
    "header length past the limit": ({"a": entry()}, b"\0" * 8, 10**12),
    "header that is not JSON": (b"{", b"", None),
    "header that is a list": ([], b"", None),
    "deeply nested header": (b"[" * 100_000, b"", None),
    "missing key": ({"a": {"dtype": "F32"}}, b"\0" * 8, None),
    "unknown dtype": ({"a": entry("F99")}, b"\0" * 8, None),
    "dtype of another size": ({"a": entry("BF16")}, b"\0" * 8, None),
    "negative size": ({"a": entry(shape=[-2])}, b"\0" * 8, None),
    "shape that overflows 64 bits": ({"a": entry(shape=[2**40, 2**40])}, b"\0" * 8, None),
    "boolean shape": ({"a": entry(shape=[True, 2])}, b"\0" * 8, None),
    "offsets past the end": ({"a": entry(offsets=[8, 16])}, b"\0" * 8, None),
    "reversed offsets": ({"a": entry(offsets=[8, 0])}, b"\0" * 8, None),
    "overlapping tensors": ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12, None),
    "three offsets": ({"a": entry(offsets=[0, 8, 8])}, b"\0" * 8, None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_a_clear_error(tmp_path: pathlib.Path, lie: str) -> None:
    header, data, length = LIES[lie]
    path = write(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: not a valid safetensors file"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7])
def test_a_truncated_file_is_a_clear_error(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        SafetensorsFile(path)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=300), position=st.integers(0, 200), change=st.binary(min_size=1, max_size=8))
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, position: int, change: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    valid = json.dumps({"a": entry(), "b": entry("U8", [4], [8, 12])}).encode()
    whole = bytearray(struct.pack("<Q", len(valid)) + valid + b"\0" * 12)
    whole[position : position + len(change)] = change
    for data in (content, bytes(whole)):
        path.write_bytes(data)
        try:
            file = SafetensorsFile(path)
        except CheckpointError:
            continue
        for name in file.entries:
            file.tensor(name).sum()


@pytest.mark.parametrize(
    "changed",
    [
        {"a": entry(dtype=["BF16"])},  # type: ignore[arg-type]
        {"a": entry(dtype={})},  # type: ignore[arg-type]
        {"a": entry(shape=[10**4000, 10**4000])},
        {"a": entry(offsets=[0, 10**4000])},
        {"x" * 100_000: entry(shape=[3])},
        {"a": entry(), "b" * 100_000: entry()},
        {"a": 5},
    ],
    ids=["dtype a list", "dtype a map", "huge shape", "huge offset", "long name", "long name of two", "no map"],
)
def test_whatever_a_header_holds_is_refused_in_a_short_line(tmp_path: pathlib.Path, changed: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not a valid safetensors file") as raised:
        SafetensorsFile(write(tmp_path / "m.safetensors", changed, bytes(8)))
    assert len(raised.value.message) < 1000
