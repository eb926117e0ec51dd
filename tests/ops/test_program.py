"""Recorded passes: what can be recorded, and what a run checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device.program import program as programs
from fastdeploy_sd.device.program.program import Program, Recording
from fastdeploy_sd.device.program.recorder import Recorder, RecordingError, Size
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.rowwise import rms_norm, swiglu
from fastdeploy_sd.types import F32

WIDTH = 64
WEIGHT = np.linspace(0.5, 2.0, WIDTH, dtype=np.float32)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def matrix(recorder: Recorder, name: str = "x", width: int = WIDTH) -> Any:
    return recorder.add_input(name, paddle.float32, (Size("num_tokens"), width))


def chosen_rows(x: Any, indices: Any) -> tuple[Any, Any]:
    """A small pass with a choice of rows, a residual and two outputs."""
    h, total = rms_norm(x, paddle.to_tensor(WEIGHT), 1e-5)
    for _ in range(3):
        h, total = rms_norm(h, paddle.to_tensor(WEIGHT), 1e-5, total)
    return total, swiglu(gather_output_rows(h, indices))


MAX_TOKENS, MAX_ROWS = 1000, 300


class ChosenRows:
    """The pass as a program, with its inputs."""

    def __init__(self, recorder: Recorder, shared: Any = None) -> None:
        self.recording = recording_of(recorder)
        self.inputs = whole_inputs()
        self.program = Program(self.recording, self.inputs, shared)

    def run(self, x: Any, indices: Any) -> list[Any]:
        self.inputs["x"][: len(x)], self.inputs["indices"][: len(indices)] = x, indices
        self.program.run({"num_tokens": len(x), "num_rows": len(indices)})
        total, chosen = self.program.outputs
        return [total[: len(x)], chosen[: len(indices)]]


def recording_of(recorder: Recorder) -> Recording:
    indices = recorder.add_input("indices", paddle.int32, (Size("num_rows"),))
    outputs = chosen_rows(matrix(recorder), indices)
    return Recording(recorder, outputs, {"num_tokens": MAX_TOKENS, "num_rows": MAX_ROWS})


def whole_inputs() -> dict[str, Any]:
    return {"indices": np.zeros(MAX_ROWS, np.int32), "x": np.zeros((MAX_TOKENS, WIDTH), np.float32)}


def assert_same(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        np.testing.assert_array_equal(g.numpy(), w.numpy())


def rows(count: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def test_a_program_does_what_the_ops_do_whatever_the_sizes(recorder: Recorder) -> None:
    """Up to its bounds, and for no rows; nothing moves."""
    step = ChosenRows(recorder)
    addresses = [output.data_ptr() for output in step.program.outputs]
    for num_tokens, num_rows in [(3, 2), (1, 1), (200, 5), (3, 300), (7, 0), (1000, 300), (2, 2)]:
        x = rows(num_tokens, seed=num_tokens)
        indices = np.random.default_rng(num_rows).integers(0, num_tokens, num_rows).astype(np.int32)
        assert_same(step.run(x, indices), chosen_rows(paddle.to_tensor(x), indices))
    assert addresses == [output.data_ptr() for output in step.program.outputs]


@pytest.mark.parametrize(
    "sizes", [{"num_tokens": 1001, "num_rows": 1}, {"num_tokens": 1}, {"num_tokens": -1, "num_rows": 1}]
)
def test_a_size_beyond_its_bound_is_refused(recorder: Recorder, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"sizes: expected num_(tokens|rows) in 0\.\.\d+, got"):
        ChosenRows(recorder).program.run(sizes)


def test_a_size_without_a_bound_is_refused(recorder: Recorder) -> None:
    normed, _ = rms_norm(matrix(recorder), paddle.ones([WIDTH]), 1e-5)
    with pytest.raises(ValueError, match="bounds: expected one for num_tokens, got num_rows"):
        Recording(recorder, [normed], {"num_rows": 3})


def test_an_arena_that_the_system_has_no_memory_for_is_refused_when_a_program_is_made(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(programs, "aligned_zeros", refuse)
    with pytest.raises(ConfigError, match=r"expected steps that the system has memory for, got \d+ bytes"):
        ChosenRows(recorder)


def test_programs_of_two_recordings_may_share_an_arena() -> None:
    recordings = [recording_of(Recorder()) for _ in range(2)]
    shared = programs.allocate_arena(max(recording.num_bytes for recording in recordings))
    steps = [ChosenRows(Recorder(), shared) for _ in recordings]
    for turn, num_tokens in enumerate((3, 200, 3, 1000)):
        x, indices = rows(num_tokens, seed=turn), np.zeros(2, np.int32)
        got = steps[turn % 2].run(x, indices)
        assert_same(got, chosen_rows(paddle.to_tensor(x), indices))
        assert shared.data_ptr() <= got[0].data_ptr() < shared.data_ptr() + shared.shape[0]


def test_two_programs_over_one_recording_do_not_disturb_each_other(recorder: Recorder) -> None:
    """What a second set of a step's memory needs: one may be filled while the other runs, or is still read."""
    first = ChosenRows(recorder)
    inputs = whole_inputs()
    second = Program(first.recording, inputs)
    wanted = first.run(rows(5), np.zeros(2, np.int32))
    kept = [output.numpy().copy() for output in wanted]
    inputs["x"][:7] = rows(7, seed=1)
    second.run({"num_tokens": 7, "num_rows": 1})
    for got, want in zip(wanted, kept, strict=True):
        np.testing.assert_array_equal(got.numpy(), want)
    assert_same(
        [second.outputs[0][:7], second.outputs[1][:1]],
        chosen_rows(paddle.to_tensor(rows(7, seed=1)), inputs["indices"][:1]),
    )


def test_slices_that_are_copies_are_refused_when_a_program_is_made(recorder: Recorder) -> None:
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        with pytest.raises(ConfigError, match="FLAGS_use_stride_kernel: expected 1"):
            ChosenRows(recorder)
    finally:
        paddle.set_flags({"FLAGS_use_stride_kernel": True})


def test_a_timed_run_names_every_call(recorder: Recorder) -> None:
    step = ChosenRows(recorder)
    names, nanoseconds = step.program.timed_run({"num_tokens": 2, "num_rows": 1})
    assert names == (*["rms_norm"] * 4, "gather_output_rows", "swiglu")
    assert len(nanoseconds) == len(names)
    assert (nanoseconds > 0).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"y": rows(2)}, r"inputs: expected indices, x, got indices, x, y"),
        ({"x": np.zeros((MAX_TOKENS, WIDTH))}, r"x: expected contiguous .*float32, got float64"),
        ({"x": rows(MAX_TOKENS - 1)}, r"x: expected shape \[1000, 64\], got \[999, 64\]"),
        ({"x": rows(2)[0]}, r"x: expected shape .*got \[64\]"),
        ({"x": rows(2 * MAX_TOKENS)[::2]}, r"x: expected contiguous"),
        ({"indices": np.zeros(MAX_ROWS, np.int64)}, r"indices: expected contiguous .*int32, got int64"),
    ],
)
def test_an_input_must_be_as_declared(recorder: Recorder, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Program(recording_of(recorder), whole_inputs() | change)


def test_an_op_that_refuses_its_arguments_is_named(recorder: Recorder) -> None:
    step = ChosenRows(recorder)
    with pytest.raises(
        ValueError, match=r"call 4 \(gather_output_rows\): indices: expected rows of x, got one outside"
    ):
        step.run(rows(2), np.array([2], np.int32))
    step.run(rows(3), np.array([2], np.int32))


# ---- what cannot be recorded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        bool,
        lambda x: x == 0,
        np.asarray,
        lambda x: x + 1,
        len,
        lambda x: x[0],
        lambda x: paddle.concat([x, x]),
        lambda x: x.shape[0] == 1,
        lambda x: x.shape[0] > 1,
        lambda x: range(x.shape[0]),
        lambda x: bool(x.shape[0]),
    ],
)
def test_looking_at_content_or_sizes_is_refused(recorder: Recorder, look: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        look(matrix(recorder))


@pytest.mark.parametrize("name", ["numpy", "astype", "item", "reshape"])
def test_tensor_methods_are_refused_by_name(recorder: Recorder, name: str) -> None:
    with pytest.raises(RecordingError, match=rf"expected only ops of fastdeploy_sd.ops, got \.{name}"):
        getattr(matrix(recorder), name)


@pytest.mark.parametrize("look", [lambda x: hasattr(x, "scale"), lambda x: getattr(x, "scale", None)])
def test_asking_whether_a_tensor_has_something_is_no_silent_no(recorder: Recorder, look: Any) -> None:
    with pytest.raises(RecordingError, match=r"got \.scale"):
        look(matrix(recorder))


def test_an_output_must_be_what_an_op_of_the_recording_returned(recorder: Recorder) -> None:
    x = matrix(recorder)
    normed, _ = rms_norm(x, paddle.ones([WIDTH]), 1e-5)
    with pytest.raises(RecordingError, match=r"output \[num_tokens, 64\]: .* got the input x"):
        Recording(recorder, [normed, x], {"num_tokens": 1})
    with pytest.raises(RecordingError, match=r"output .*: expected a tensor of the recording, got one of another"):
        Recording(recorder, [matrix(Recorder())], {"num_tokens": 1})


def test_shapes_and_dtypes_are_checked_when_recording(recorder: Recorder) -> None:
    x = matrix(recorder)
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected shape \[64\], got \[32\]"):
        rms_norm(x, paddle.ones([32]), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected .*float32, got .*bfloat16"):
        rms_norm(x, paddle.ones([WIDTH], dtype="bfloat16"), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: residual: expected shape \[num_tokens, 64\], got \[rows, 64\]"):
        rms_norm(x, paddle.ones([WIDTH]), 1e-5, recorder.add_tensor(paddle.float32, (Size("rows"), WIDTH)))
    with pytest.raises(
        ValueError, match=r"swiglu: gate_up: expected shape \[num_rows, 2\*i.*\], got \[num_tokens, 63\]"
    ):
        swiglu(matrix(recorder, "odd", 63))


def test_tensors_of_two_recordings_do_not_mix(recorder: Recorder) -> None:
    other = matrix(Recorder())
    with pytest.raises(
        ValueError, match="residual: expected a tensor of the pass that is recorded, got one of another"
    ):
        rms_norm(matrix(recorder), paddle.ones([WIDTH]), 1e-5, other)
