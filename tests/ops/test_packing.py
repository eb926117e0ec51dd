"""Packing reads a matrix in place and in parts, and its bytes change only together with the layout's version."""

from __future__ import annotations

import errno
import hashlib
import itertools
import mmap
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.device.checksum import chunk_checksums, packed_layout_version
from fastdeploy_sd.device.memory import CHUNK_BYTES, HUGE_PAGE_BYTES, WeightMemory
from fastdeploy_sd.ops.bf16 import to_bf16, widen
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import PackedLinear, pack_linear
from fastdeploy_sd.ops.reference.linear import quantize_int4, quantize_int8
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from tests.ops.backends import isa, threads

# blake2b of the packed forms of one matrix under version 2 of the layout; a new version has new ones.
PACKED_DIGESTS = {2: "d5e95e9b11c93805"}


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    values[0, :3] = 1e-41, -1e-32, 0.0
    return values


def special_weights() -> np.ndarray:
    """Groups that have no scale, or whose candidates all err alike."""
    values = weights(40, 300)
    values[1, 7], values[2, 9], values[3] = np.inf, np.nan, 0.0
    values[4, 130:] *= np.float32(1e-38)
    values[5, :128] *= np.float32(3e37)
    values[6] = 0.5
    return values


def unpacked(packed: PackedLinear[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return q i8[N, groups, 128] and scale f32[N, groups] of an int format."""
    num_groups = -(-packed.in_features // 128)
    integer_bytes = 4096 if packed.format == "wint8" else 2048 + 256
    panels = packed.data.reshape(-1, num_groups, integer_bytes + 128)
    scale = np.ascontiguousarray(panels[..., integer_bytes:]).view(np.float32)
    q = panels[..., :integer_bytes].astype(np.int16)
    if packed.format == "wint8":
        q = q.reshape(-1, num_groups, 32, 32, 4) - 128
    else:
        halves = q[..., :2048].reshape(-1, num_groups, 32, 16, 4)
        factors = np.repeat(q[..., 2048:].reshape(-1, num_groups, 8, 32), 4, axis=2)[..., None]
        q = (np.concatenate([halves & 15, halves >> 4], axis=3) - (factors >> 4)) * (factors & 15)
        assert (np.abs(q) <= 127).all()
    q = q.transpose(0, 3, 1, 2, 4).reshape(-1, num_groups, 128).astype(np.int8)
    return q[: packed.out_features], scale.transpose(0, 2, 1).reshape(-1, num_groups)[: packed.out_features]


@pytest.mark.parametrize(("fmt", "quantize"), [("wint8", quantize_int8), ("wint4", quantize_int4)])
@pytest.mark.parametrize("level", library.available_isas())
def test_stores_the_integers_and_scales_of_the_reference(fmt: LinearFormat, quantize: Any, level: str) -> None:
    values = special_weights()
    with isa(level):
        q, scale = unpacked(pack_linear(values, fmt))
    with np.errstate(over="ignore", invalid="ignore"):
        want_q, want_scale = quantize(values)
    np.testing.assert_array_equal(q, want_q)
    np.testing.assert_array_equal(scale, want_scale)


def test_factors_halve_what_four_bits_lose() -> None:
    """One scale per 128 normal numbers, the best of many, leaves a squared error of 1.1 % to 1.2 %."""
    values = weights(64, 512, 3)[1:]
    q, scale = unpacked(pack_linear(values, "wint4"))
    error = (q * scale[..., None]).reshape(values.shape) - values
    assert (error**2).sum() < 0.005 * (values**2).sum()


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float16])
def test_parts_pack_like_the_whole(fmt: LinearFormat, dtype: type) -> None:
    whole = weights(101, 261)
    data = to_bf16(whole) if dtype is np.uint16 else whole.astype(dtype)
    want = pack_linear(widen(data), fmt).data
    cuts = [0, 7, 7, 40, 101]  # one empty, none at a panel's border
    parts = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    for flags in ((False,) * 4, (True,) * 4, (True, False, False, True)):
        matrix = WeightMatrix(
            tuple(
                FloatPart(str(i), np.ascontiguousarray(part.T) if is_transposed else part, is_transposed)
                for i, (part, is_transposed) in enumerate(zip(parts, flags, strict=True))
            )
        )
        assert matrix.shape == whole.shape
        np.testing.assert_array_equal(widen(matrix.to_array()), widen(data))
        for level in library.available_isas():
            with isa(level), threads(3):
                np.testing.assert_array_equal(pack_linear(matrix, fmt).data, want, err_msg=f"{level} {flags}")


def test_every_half_is_widened_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    halves = bits.view(np.float16)
    for level in library.available_isas():
        with isa(level):
            packed = pack_linear(halves, "float32").data.view(np.float32).reshape(8, 256, 32)
        np.testing.assert_array_equal(packed.transpose(0, 2, 1).reshape(256, 256), halves.astype(np.float32))


def test_parts_of_mixed_types_pack_together() -> None:
    parts = [weights(33, 64), to_bf16(weights(20, 64, 1)), weights(5, 64, 2).astype(np.float16)]
    matrix = WeightMatrix(tuple(FloatPart(str(i), part) for i, part in enumerate(parts)))
    want = pack_linear(np.concatenate([widen(part) for part in parts]), "wint4").data
    np.testing.assert_array_equal(pack_linear(matrix, "wint4").data, want)


def test_the_bytes_are_those_of_the_layout_version() -> None:
    digest = hashlib.blake2b(digest_size=8)
    for fmt in LINEAR_FORMATS:
        digest.update(pack_linear(special_weights(), fmt).data.tobytes())
    assert PACKED_DIGESTS.get(packed_layout_version()) == digest.hexdigest(), "raise kPackedLayoutVersion"


def test_parts_that_do_not_fit_are_named() -> None:
    parts = (FloatPart("a", np.zeros((2, 4), np.float32)), FloatPart("b", np.zeros((2, 5), np.float32)))
    with pytest.raises(ValueError, match=r"expected parts \[N, K\] of one K, got shapes \[\(2, 4\), \(2, 5\)\]"):
        pack_linear(WeightMatrix(parts), "float32")
    with pytest.raises(ValueError, match="weight: expected contiguous"):
        pack_linear(np.zeros((4, 4), np.float32)[:, ::2], "float32")


def test_memory_is_aligned_apart_and_zero() -> None:
    memory = WeightMemory()
    sizes = [1, 0, 4096, 4097, CHUNK_BYTES + 1, 5]
    taken = [memory.take(size) for size in sizes]
    assert [len(data) for data in taken] == sizes
    spans = sorted((data.ctypes.data, data.ctypes.data + len(data)) for data in taken if len(data))
    assert all(begin % 4096 == 0 for begin, _ in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert taken[0].ctypes.data % HUGE_PAGE_BYTES == 0
    assert not taken[3].any()
    taken[3][:] = 1


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    taken = WeightMemory().take(4097)
    assert len(taken) == 4097
    assert not taken.any()
    taken[:] = 1


@pytest.mark.parametrize(
    ("text", "checksum"),
    [
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_checksums_are_xxh64(text: bytes, checksum: int) -> None:
    """Values published with the algorithm."""
    assert chunk_checksums(np.frombuffer(text, np.uint8), 1000).tolist() == [checksum]


def test_checksums_are_of_each_chunk() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    want = [chunk_checksums(data[begin : begin + 77], 77)[0] for begin in range(0, 1000, 77)]
    for count in (1, 3):
        with threads(count):
            assert chunk_checksums(data, 77).tolist() == [int(value) for value in want]
    assert chunk_checksums(data[:0], 77).tolist() == []
    with pytest.raises(ValueError, match="chunk_bytes: expected 1 or more"):
        chunk_checksums(data, 0)
    with pytest.raises(ValueError, match="data: expected contiguous bytes"):
        chunk_checksums(data[::2], 7)
