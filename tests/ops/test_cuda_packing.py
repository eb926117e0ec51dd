"""Weights that a GPU packs have the bytes that processors pack, and go up through two bounded pieces of memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.device.cuda import uploads as cuda_uploads
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.models.weights.storages.factors import factors_of
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.device_packing import pack_groups_on_device, pack_on_device
from fastdeploy_sd.ops.group_format import GROUP_FORMATS
from fastdeploy_sd.ops.group_packing import pack_groups, stored_matrix
from fastdeploy_sd.ops.linear_format import GPU_FORMATS, LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import FACTOR_INPUTS, input_groups, pack_linear, packed_bytes, unpack_codes
from fastdeploy_sd.ops.weight_matrix import Codes, FloatPart, WeightMatrix
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.ops.cuda_device import emulated, loses_the_device
from tests.ops.test_grouped_linear import NUM_COLUMNS, packed
from tests.ops.test_grouped_linear import matrix as matrix_of_blocks
from tests.ops.test_packing import special_weights, weights

pytestmark = pytest.mark.slow

FORMATS = (*LINEAR_FORMATS, *GPU_FORMATS)


def packed_there(
    gpu: CudaDevice, matrices: Sequence[WeightMatrix], fmt: LinearFormat, slices: SliceRule = WHOLE
) -> np.ndarray:
    """What the device packs of matrices of one shape, one behind the other."""
    rows, columns = matrices[0].shape
    size = packed_bytes(columns, rows, fmt, slices)
    tensor = gpu.empty((len(matrices) * size,), np.uint8)
    for i, matrix in enumerate(matrices):
        pack_on_device(gpu, tensor.address + i * size, matrix, fmt, slices)
    return gpu.read(tensor)


def typed(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return to_bf16(values)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def halves() -> np.ndarray:
    """Every number of half precision."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(128, 512)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bytes_are_those_of_processors(gpu: CudaDevice, fmt: LinearFormat, dtype: str) -> None:
    """Also where groups have no scale, sums have slices, and parts lie in larger matrices or the other way round."""
    values = typed(special_weights(), dtype)
    cases = [(WeightMatrix.whole(values), WHOLE), (WeightMatrix.whole(values), SliceRule(4, 25))]
    cases.append((WeightMatrix((FloatPart("turned", values, is_transposed=True),)), WHOLE))
    whole = FloatPart("some rows and inputs", typed(weights(90, 400, 1), dtype)).rows(3, 72).columns(7, 267)
    turned = FloatPart("turned", typed(weights(300, 60, 2), dtype), is_transposed=True).rows(5, 50).columns(10, 270)
    parts = WeightMatrix((turned, whole.rows(0, 0), whole, FloatPart("floats", weights(5, 260, 3))))
    cases += [(parts, SliceRule(2, 128)), (parts, WHOLE)]
    if dtype == "float16":
        cases.append((WeightMatrix.whole(halves()), WHOLE))
    for matrix, slices in cases:
        want = pack_linear(matrix, fmt, slices).data
        np.testing.assert_array_equal(packed_there(gpu, [matrix], fmt, slices), want, err_msg=f"{matrix.name} {slices}")


@pytest.mark.parametrize(("kind", "fmt"), [(kind, block.fmt) for kind, block in BLOCK_TYPES.items()])
def test_integers_have_the_bytes_of_processors(
    gpu: CudaDevice, kind: str, fmt: LinearFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of a panel or two, and where slices end within a unit or not."""
    monkeypatch.setattr(cuda_uploads, "PIECE_BYTES", 64 << 10)
    for slices in (WHOLE, SliceRule(4, GROUP_FORMATS[fmt].unit)):
        own = matrix_of_blocks((kind, 70), (kind, 60))
        tensor = gpu.empty((packed_bytes(NUM_COLUMNS, 130, fmt, slices),), np.uint8)
        stored = stored_matrix(own, fmt, slices)
        assert stored is not None
        pack_groups_on_device(gpu, tensor.address, stored)
        np.testing.assert_array_equal(gpu.read(tensor), packed(own, fmt, slices).data)


class CodedPart(FloatPart):
    """Numbers that are stored as quantising makes them, but for a group of the third row, which has other codes."""

    def codes(self, fmt: LinearFormat, slices: SliceRule) -> Codes:
        groups = input_groups(self.shape[1], slices)
        firsts = [group.start for group in groups]
        codes, scales, zeros = unpack_codes(pack_linear(WeightMatrix((FloatPart(self.name, self.data),)), fmt, slices))
        is_exact = np.ones((len(codes), len(groups)), np.bool_)
        if fmt == "wint4":
            found = factors_of(
                groups, FACTOR_INPUTS, scales[:, ::FACTOR_INPUTS], zeros[:, ::FACTOR_INPUTS].astype("i2")
            )
            assert found is not None
            return Codes(lambda rows: codes[rows.start : rows.stop], found[0], is_exact, found[1])
        codes[2, groups[1].start : groups[1].stop], is_exact[2, 1] = 77, False
        return Codes(lambda rows: codes[rows.start : rows.stop], scales[:, firsts], is_exact)


@pytest.mark.parametrize("fmt", ["wint8", "wint4", "fp8", "e4m3"])
def test_codes_have_the_bytes_that_quantising_gave(
    gpu: CudaDevice, fmt: LinearFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors and GPUs, where parts, slices and panels end anywhere; in pieces of a panel or two."""
    monkeypatch.setattr(cuda_uploads, "PIECE_BYTES", 64 << 10)
    # Factors of wint4 where a group has ended may be any.
    columns, unit = (640, 128) if fmt == "wint4" else (592, 80)
    for slices in (WHOLE, SliceRule(4, unit)):
        own = WeightMatrix(tuple(CodedPart(f"p{rows}", weights(rows, columns, rows)) for rows in (70, 57)))
        want, stored = pack_linear(own, fmt, slices).data, stored_matrix(own, fmt, slices, keeps_integers=False)
        assert stored is not None
        data, tensor = WeightMemory().take(len(want)), gpu.empty((len(want),), np.uint8)
        pack_groups(stored, data)
        np.testing.assert_array_equal(data, want)
        pack_groups_on_device(gpu, tensor.address, stored)
        np.testing.assert_array_equal(gpu.read(tensor), want)


def test_many_matrices_go_through_two_small_pieces(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that needs several pieces, one that needs a larger one, and many that share one."""
    monkeypatch.setattr(cuda_uploads, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(cuda_uploads, "_SHARE_BYTES", 1 << 10)  # by several threads
    shapes = [(300, 261), (33, 700), *[(40, 130)] * 9]
    matrices = [WeightMatrix.whole(weights(*shape, i)) for i, shape in enumerate(shapes)]
    with gpu.loading(1 << 30) as uploads:
        assert uploads.piece_bytes == 64 << 10
        got = [packed_there(gpu, [matrix], "wint8") for matrix in matrices]
    for matrix, data in zip(matrices, got, strict=True):
        np.testing.assert_array_equal(data, pack_linear(matrix, "wint8").data)


def test_what_is_written_after_a_copy_was_started_changes_nothing(gpu: CudaDevice) -> None:
    """The third piece takes the first one's place, whose copy must have been made."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, size, np.uint8) for size in (4096, 4096, 3000, 10_000, 1)]
    with gpu.loading(4096):
        sent = []
        for array in arrays:
            own = array.copy()
            sent.append(gpu.wrap(own))
            own[:] = 0
    for tensor, array in zip(sent, arrays, strict=True):
        np.testing.assert_array_equal(gpu.read(tensor), array)


def test_rows_are_written_piece_by_piece(gpu: CudaDevice) -> None:
    want = np.arange(7 * 50, dtype=np.float32).reshape(7, 50)
    asked: list[slice] = []

    def write(rows: slice, out: np.ndarray) -> None:
        asked.append(rows)
        out[...] = want[rows]

    with gpu.loading(500):
        tensor = gpu.filled(want.shape, np.float32, write)
    np.testing.assert_array_equal(gpu.read(tensor), want)
    assert [rows.start for rows in asked] == [0, 2, 4, 6]


@pytest.mark.usefixtures("no_collection")
def test_pieces_are_given_back(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(type(gpu.library), "discard", lambda _, name, address: freed.append(name))
    with gpu.loading(1 << 20), gpu.loading(5) as inner:
        assert inner.piece_bytes == 1 << 20
        for _ in range(3):
            inner.take(700 << 10)
    assert freed.count("free_pinned") == 2


def test_a_copy_that_fails_shows_where_all_is_waited_for() -> None:
    gpu = CudaDevice(emulated().device.library)
    with loses_the_device():
        loading = gpu.loading(4096)
        uploads = loading.__enter__()
        host, staged = uploads.take(64)
        uploads.copy(staged, host)
        uploads.copy(staged + (1 << 40), host)
        with pytest.raises(DeviceLost, match="memory of the device"):
            loading.__exit__(None, None, None)


def test_sizes_that_make_no_sense_are_refused(gpu: CudaDevice) -> None:
    with pytest.raises(ValueError, match="expected float32, float16 or bfloat16"):
        packed_there(gpu, [WeightMatrix.whole(np.zeros((4, 4), np.int8))], "wint8")
    with pytest.raises(ValueError, match="packed: expected an address"):
        pack_on_device(gpu, 8, WeightMatrix.whole(np.zeros((4, 4), np.float32)), "wint8")
