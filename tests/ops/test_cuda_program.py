"""Recorded passes and bound calls on a GPU, and on the emulated one: what differs from the CPU's program."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import paddle
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.device import device
from fastdeploy_sd.device.cuda import buffer as cuda_mirror
from fastdeploy_sd.device.cuda import library as cuda_library
from fastdeploy_sd.device.cuda.device import CudaDevice, cuda_device
from fastdeploy_sd.device.program.program import Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.errors import ConfigError, DeviceLost
from fastdeploy_sd.ops.batch import GATHER_OUTPUT_ROWS, gather_output_rows
from fastdeploy_sd.ops.rowwise import RMS_NORM, rms_norm, swiglu
from fastdeploy_sd.ops.sampling import TOKEN_LOGPROBS
from fastdeploy_sd.types import F32, I32
from tests.ops.cuda_device import loses_the_device

pytestmark = pytest.mark.slow

WIDTH, MAX_TOKENS, MAX_ROWS = 32, 20, 7
WEIGHT = np.linspace(0.5, 2.0, WIDTH, dtype=np.float32)


class ChosenRows:
    """A small pass with a choice of rows, a residual and two outputs."""

    def __init__(self, gpu: CudaDevice) -> None:
        recorder = Recorder()
        x: Any = recorder.add_input("x", paddle.float32, (Size("num_tokens"), WIDTH))
        indices: Any = recorder.add_input("indices", paddle.int32, (Size("num_rows"),))
        weight = gpu.wrap(WEIGHT)
        h, total = rms_norm(x, weight, 1e-5)
        h, total = rms_norm(h, weight, 1e-5, total)
        outputs = total, swiglu(gather_output_rows(h, indices))
        self.recording = Recording(recorder, outputs, {"num_tokens": MAX_TOKENS, "num_rows": MAX_ROWS})
        self.gpu = gpu
        self.x = gpu.buffer(np.zeros((MAX_TOKENS, WIDTH), np.float32))
        self.indices = gpu.buffer(np.zeros(MAX_ROWS, np.int32))
        self.inputs = {"x": self.x.tensor, "indices": self.indices.tensor}
        self.program = gpu.program(self.recording, self.inputs)

    def start(self, x: F32, indices: I32) -> None:
        self.x.array[: len(x)], self.indices.array[: len(indices)] = x, indices
        self.x.upload(0, len(x))
        self.indices.upload(0, len(indices))
        self.program.run({"num_tokens": len(x), "num_rows": len(indices)})

    def run(self, x: F32, indices: I32) -> list[F32]:
        self.start(x, indices)
        counts = (len(x), len(indices))
        return [self.gpu.read(out[:count]) for out, count in zip(self.program.outputs, counts, strict=True)]


def rows(count: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def assert_same(got: list[F32], x: F32, indices: I32) -> None:
    h, total = rms_norm(x, WEIGHT, 1e-5)
    h, total = rms_norm(h, WEIGHT, 1e-5, total)
    for g, want in zip(got, (total, swiglu(gather_output_rows(h, indices))), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-6)


def test_a_program_does_what_the_ops_do_whatever_the_sizes(gpu: CudaDevice) -> None:
    step = ChosenRows(gpu)
    for num_tokens, num_rows in [(3, 2), (1, 1), (20, 7), (3, 0), (3, 2)]:
        x = rows(num_tokens, seed=num_tokens)
        indices = np.random.default_rng(num_rows).integers(0, num_tokens, num_rows).astype(np.int32)
        assert_same(step.run(x, indices), x, indices)


def test_the_host_goes_on_while_a_run_is_under_way(gpu: CudaDevice) -> None:
    """It may write the next step's inputs: what was uploaded is what the arrays held when the run was started."""
    step, indices = ChosenRows(gpu), np.array([1, 0], np.int32)
    step.start(rows(3), indices)
    got = step.run(rows(4, seed=1), indices)
    assert_same(got, rows(4, seed=1), indices)
    step.start(rows(3), indices)
    step.x.array[:] = np.nan
    total, _ = step.program.outputs
    assert_same([gpu.read(total[:3]), gpu.read(step.program.outputs[1][:2])], rows(3), indices)


def test_a_timed_run_names_every_call(gpu: CudaDevice) -> None:
    step = ChosenRows(gpu)
    names, nanoseconds = step.program.timed_run({"num_tokens": 2, "num_rows": 1})
    assert names == ("rms_norm", "rms_norm", "gather_output_rows", "swiglu")
    assert (nanoseconds > 0).all()


@pytest.mark.parametrize("sizes", [{"num_tokens": 21, "num_rows": 1}, {"num_tokens": 1}])
def test_a_size_beyond_its_bound_is_refused(gpu: CudaDevice, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"sizes: expected num_(tokens|rows) in 0\.\.\d+, got"):
        ChosenRows(gpu).program.run(sizes)


@pytest.mark.skipif(paddle.__version__ == "none", reason="needs Paddle")
def test_memory_of_the_host_is_refused(gpu: CudaDevice) -> None:
    step = ChosenRows(gpu)
    with pytest.raises(ValueError, match="x: expected memory of the GPU, got ndarray"):
        gpu.program(step.recording, step.inputs | {"x": step.x.array})
    with pytest.raises(ValueError, match=r"indices: expected .*int32\[7\], got <int32\[6\] of a device>"):
        gpu.program(step.recording, step.inputs | {"indices": step.indices.tensor[:6]})
    with pytest.raises(ValueError, match="rms_norm: x: expected memory of the GPU, got ndarray"):
        gpu.bind(
            RMS_NORM, x=rows(1), weight=gpu.wrap(WEIGHT), eps=0.0, x_scale=1.0, y=gpu.zeros((1, WIDTH), np.float32)
        )
    recorder = Recorder()
    x = recorder.add_input("x", paddle.float32, (Size("num_tokens"), WIDTH))
    outputs: Any = rms_norm(x, paddle.to_tensor(WEIGHT), 1e-5)
    recording = Recording(recorder, outputs, {"num_tokens": MAX_TOKENS})
    with pytest.raises(ValueError, match=r"constants: expected tensors of the GPU, got .*float32"):
        gpu.program(recording, {"x": step.x.tensor})


@pytest.mark.skipif(paddle.__version__ == "none", reason="needs Paddle")
def test_a_cpu_refuses_memory_of_a_gpu(gpu: CudaDevice) -> None:
    step = ChosenRows(gpu)
    with pytest.raises(ValueError, match=r"constants: expected tensors of the host, got <float32\[32\] of a device>"):
        device.Device().program(step.recording, {"x": step.x.array, "indices": step.indices.array})


def test_an_op_without_a_kernel_is_refused_by_name(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ChosenRows(gpu)
    monkeypatch.setattr(gpu.library, "has", lambda op: op != "swiglu")
    with pytest.raises(ConfigError, match="op swiglu: expected a CUDA kernel, there is none"):
        gpu.program(step.recording, step.inputs)


def test_what_a_kernel_does_wrong_is_told_with_its_call_and_is_the_end_of_the_device() -> None:
    """As on a GPU, where all that comes after such a fault fails until the process ends."""
    emulated = CudaDevice(cuda_library.load(cuda_build.build_emulated()))
    step = ChosenRows(emulated)
    with loses_the_device():
        step.start(rows(2), np.array([300000], np.int32))
        with pytest.raises(
            DeviceLost, match=r"call 2 \(gather_output_rows\): GatherRows.*: out of bounds|thread 0 out of"
        ):
            emulated.wait()
        with pytest.raises(DeviceLost, match=r"the GPU has failed: .*\(gather_output_rows\)"):
            step.run(rows(2), np.array([1], np.int32))
        with pytest.raises(DeviceLost):
            emulated.zeros((4,), np.float32)
    assert_same(step.run(rows(2), np.array([1], np.int32)), rows(2), np.array([1], np.int32))


def test_a_launch_that_is_refused_costs_nothing_else(gpu: CudaDevice) -> None:
    step, indices = ChosenRows(gpu), np.array([1], np.int32)
    last = gpu.bind(
        GATHER_OUTPUT_ROWS, x=step.x.tensor, indices=step.indices.tensor, y=gpu.zeros((7, WIDTH), np.float32)
    )
    last.params.num_rows_out = -1
    with pytest.raises(ValueError, match="gather_output_rows: num_rows_out: expected"):
        last.run()
    assert_same(step.run(rows(2), indices), rows(2), indices)


def test_a_bound_call_is_refused_when_it_is_bound(gpu: CudaDevice) -> None:
    logits, row = gpu.zeros((2, (1 << 19) + 1), np.float32), gpu.zeros((1,), np.int32)
    found = {"logprobs": gpu.zeros((1,), np.float32), "ranks": row}
    listed = {"top_token_ids": gpu.zeros((1, 1), np.int32), "top_logprobs": gpu.zeros((1, 1), np.float32)}
    with pytest.raises(ValueError, match=r"token_logprobs.*vocab_size: expected 1\.\.524288, got another number"):
        gpu.bind(TOKEN_LOGPROBS, logits=logits, rows=row, token_ids=row, num_top=1, **found, **listed)


def test_a_bound_call_runs_between_programs(gpu: CudaDevice) -> None:
    """In their order, on as many rows as its params say."""
    step, indices = ChosenRows(gpu), np.array([2, 0], np.int32)
    total = step.program.outputs[0]
    chosen = gpu.zeros((MAX_ROWS, WIDTH), np.float32)
    last = gpu.bind(GATHER_OUTPUT_ROWS, x=total, indices=step.indices.tensor, y=chosen)
    step.start(rows(3), indices)
    last.params.num_rows_out = 2
    last.run()
    step.start(rows(5, seed=1), indices)
    got = gpu.read(chosen)
    np.testing.assert_array_equal(got[2:], 0)
    want = rms_norm(rms_norm(rows(3), WEIGHT, 1e-5)[0], WEIGHT, 1e-5, rows(3))[1]
    np.testing.assert_allclose(got[:2], want[indices], rtol=1e-5, atol=1e-6)


# ---- mirrors and memory ---------------------------------------------------------------------------------------------


def test_rows_go_up_and_come_back(gpu: CudaDevice) -> None:
    """Those that were named, in one copy for all mirrors; the others stay as they are on either side."""
    table, column = gpu.buffer(np.zeros((6, 5), np.int32)), gpu.buffer(np.arange(9, dtype=np.int64))
    table.array[:], column.array[:] = 7, 1
    for mirror, *which in ((table, 1, 2), (table, 5, 6), (column, 8), (table, 1, 3), (table, 2, 2)):
        mirror.upload(*which)
    table.array[0] = 8
    gpu.transfers.send()
    table.array[1:3] = 9
    np.testing.assert_array_equal(gpu.read(table.tensor)[:, 0], [0, 7, 7, 0, 0, 7])
    np.testing.assert_array_equal(gpu.read(column.tensor), [*range(8), 1])
    table.array[:], column.array[:] = -1, -1
    table.download(0, 2)
    column.download()
    assert (table.array == -1).all(), "nothing comes before the wait"
    gpu.wait()
    np.testing.assert_array_equal(table.array[:, 0], [0, 7, -1, -1, -1, -1])
    np.testing.assert_array_equal(column.array, [*range(8), 1])


def test_what_is_larger_than_the_pinned_memory_goes_up_in_parts(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_mirror, "STAGING_BYTES", 1000)
    gpu = CudaDevice(gpu.library)
    table, column = gpu.buffer(np.zeros((7, 100), np.int32)), gpu.buffer(np.zeros(3, np.int64))
    for first in (1, 1000):
        table.array[:], column.array[:] = first + np.arange(700).reshape(7, 100), first
        table.upload(0, 6)
        column.upload(1)
        gpu.transfers.send()
        table.array[:] = -1
        want = (first + np.arange(700)).reshape(7, 100) * (np.arange(7) < 6)[:, None]
        np.testing.assert_array_equal(gpu.read(table.tensor), want)
        np.testing.assert_array_equal(gpu.read(column.tensor), [0, first, first])


def test_a_fetch_waits_for_nothing_that_was_started_since(gpu: CudaDevice) -> None:
    """Two copies of a mirror are under way at once, each of what was there when it was started."""
    table, begun, ended = gpu.buffer(np.zeros(5, np.int32)), gpu.event(), gpu.event()
    fetchers = [table.fetcher() for _ in range(2)]
    begun.record()
    for value, fetcher in enumerate(fetchers, 1):
        table.array[:] = value
        table.upload()
        gpu.transfers.send()
        fetcher.start()
    ended.record()
    table.array[:] = -1
    for value, fetcher in enumerate(fetchers, 1):
        assert (table.array == (value - 1 or -1)).all(), "nothing comes before it is taken"
        fetcher.take()
        assert (table.array == value).all()
    ended.wait()
    assert ended.seconds_since(begun) >= 0


def test_what_could_not_be_sent_goes_up_with_the_next_try(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller that noted it need not know, and may have more by then."""

    def fail() -> NoReturn:
        raise ValueError("a copy was refused")

    table = gpu.buffer(np.zeros((4, 5), np.int32))
    table.array[:] = 7
    table.upload(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.transfers, "_next_staging", fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="was refused"):
                gpu.transfers.send()
    table.upload(3)
    gpu.transfers.send()
    assert not gpu.transfers.up
    np.testing.assert_array_equal(gpu.read(table.tensor)[:, 0], [0, 7, 0, 7])


def test_columns_in_one_piece_have_twins_in_one_piece(gpu: CudaDevice) -> None:
    piece = np.zeros(256, np.uint8)
    ids, slots = piece[:64].view(np.int32), piece[128:192].view(np.int64)
    mirror = gpu.buffer(piece)
    ids[:], slots[:] = 3, -1
    mirror.upload()
    gpu.transfers.send()
    np.testing.assert_array_equal(gpu.read(mirror.of(ids)), ids)
    np.testing.assert_array_equal(gpu.read(mirror.of(slots[2:])), slots[2:])
    with pytest.raises(ValueError, match="view: expected contiguous elements of uint8"):
        mirror.of(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="view: expected contiguous elements of uint8"):
        mirror.of(ids[::2])


def test_tensors_are_written_and_read_by_rows(gpu: CudaDevice) -> None:
    tensor = gpu.zeros((4, 3), np.uint16)
    gpu.write(tensor[1:], np.full((2, 3), 5, np.uint16))
    np.testing.assert_array_equal(gpu.read(tensor)[:, 0], [0, 5, 5, 0])
    assert tensor.dtype == paddle.bfloat16
    for wrong in (np.zeros((2, 3), np.float32), np.zeros((2, 2), np.uint16), np.zeros((5, 3), np.uint16)):
        with pytest.raises(ValueError, match=r"array: expected rows of <bfloat16\[4, 3\] of a device>, got"):
            gpu.write(tensor, wrong)


# ---- which device ---------------------------------------------------------------------------------------------------


def test_a_process_has_one_device() -> None:
    library = cuda_library.load(cuda_build.build_emulated())
    try:
        assert device.choose(cuda_device(library)).text == "emulated GPU"
        assert device.device() is device.choose(cuda_device(library))
    finally:
        device.choose(None)
    assert device.device().kind == "cpu"
