"""NumPy arrays as tensors: shared memory, right lifetime, right type."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.tensors import aligned_zeros, from_numpy, to_numpy


def test_the_tensor_shares_the_arrays_memory() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    tensor = from_numpy(array)
    array[1, 2] = -7
    assert tensor[1, 2].item() == -7


def test_the_tensor_keeps_the_array_alive_and_no_longer_than_itself() -> None:
    array = np.ones(1 << 16, np.int32)
    alive = weakref.ref(array)
    tensor = from_numpy(array)
    del array
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, paddle.float32), (np.uint16, paddle.bfloat16), (np.uint8, paddle.uint8),
        (np.int32, paddle.int32), (np.int64, paddle.int64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 0), (2, 3, 4)])
def test_types_and_shapes(dtype: type, expected: paddle.dtype, shape: tuple[int, ...]) -> None:
    tensor = from_numpy(np.zeros(shape, dtype))
    assert tensor.dtype == expected
    assert tuple(tensor.shape) == shape


def test_a_slice_is_read_where_it_begins() -> None:
    """Also one of bfloat16, which NumPy has not."""
    for dtype in (np.uint16, np.float32, np.int32):
        array = np.arange(64, dtype=dtype)
        part = from_numpy(array)[16:48].reshape([4, 8])
        assert device().read(part).tolist() == array[16:48].reshape(4, 8).tolist()


def test_read_only_arrays_are_taken_as_they_are() -> None:
    array = np.frombuffer(b"\x01\0\0\0\x02\0\0\0", np.int32)
    assert from_numpy(array).tolist() == [1, 2]


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="expected contiguous"):
        from_numpy(np.zeros((4, 4), np.float32)[:, 1])
    with pytest.raises(ValueError, match="got float64"):
        from_numpy(np.zeros(3))


def test_aligned_zeros_start_at_a_cache_line() -> None:
    for size in (1, 1000, 1 << 20):
        array = aligned_zeros((size, 3), np.uint16)
        assert array.ctypes.data % 64 == 0
        assert array.shape == (size, 3)
        assert not array.any()


def test_an_array_shares_the_tensors_memory_and_outlives_it() -> None:
    tensor = paddle.arange(12, dtype="float32").reshape([3, 4])
    array = to_numpy(tensor)
    tensor[1, 2] = -7.0
    assert array[1, 2] == -7.0
    del tensor
    gc.collect()
    np.testing.assert_array_equal(array[2], [8.0, 9.0, 10.0, 11.0])


def test_a_tensor_that_is_no_plain_array_is_refused() -> None:
    wants_gradient = paddle.ones([2])
    wants_gradient.stop_gradient = False
    with pytest.raises(BufferError):
        to_numpy(wants_gradient)
    with pytest.raises(RuntimeError, match="dtype"):
        to_numpy(paddle.ones([2], dtype="bfloat16"))
