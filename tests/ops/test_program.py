"""Recorded passes: what can be recorded, and what a run checks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops import arena, shim
from fastdeploy_sd.ops.activation import swiglu
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.lowering import LOWERINGS
from fastdeploy_sd.ops.norm import rms_norm
from fastdeploy_sd.ops.program import Program
from fastdeploy_sd.ops.recorder import Recorder, RecordingError, Size
from fastdeploy_sd.ops.tensors import aligned_zeros
from fastdeploy_sd.types import F32

WIDTH = 64
WEIGHT = np.linspace(0.5, 2.0, WIDTH, dtype=np.float32)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(LOWERINGS)


def matrix(recorder: Recorder, name: str = "x", width: int = WIDTH) -> Any:
    return recorder.add_input(name, paddle.float32, (Size("num_tokens"), width))


def chosen_rows(x: Any, indices: Any) -> tuple[Any, Any]:
    """A small pass with a choice of rows, a residual and two outputs."""
    h, total = rms_norm(x, paddle.to_tensor(WEIGHT), 1e-5)
    for _ in range(3):
        h, total = rms_norm(h, paddle.to_tensor(WEIGHT), 1e-5, total)
    return total, swiglu(gather_output_rows(h, indices))


def record_chosen_rows(recorder: Recorder, shared: arena.Arena | None = None) -> Program:
    indices = recorder.add_input("indices", paddle.int32, (Size("num_rows"),))
    return Program(recorder, chosen_rows(matrix(recorder), indices), shared)


def assert_same(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        np.testing.assert_array_equal(g.numpy(), w.numpy())


def rows(count: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def test_a_program_does_what_the_ops_do_whatever_the_sizes(recorder: Recorder) -> None:
    """Also when it grows in between, for more tokens, for more rows, and for none."""
    program = record_chosen_rows(recorder)
    for num_tokens, num_rows in [(3, 2), (1, 1), (200, 5), (3, 300), (7, 0), (1000, 1000), (2, 2)]:
        x = rows(num_tokens, seed=num_tokens)
        indices = np.random.default_rng(num_rows).integers(0, num_tokens, num_rows).astype(np.int32)
        wanted = chosen_rows(paddle.to_tensor(x), indices)
        assert_same(program.run({"x": x, "indices": indices}), wanted)


def test_inputs_given_again_are_read_where_they_are(recorder: Recorder) -> None:
    """The same object with something else in its arrays, other inputs of the same sizes, and the first ones again."""
    program = record_chosen_rows(recorder)
    first, second = ({"x": rows(3, seed=seed), "indices": np.array([seed], np.int32)} for seed in (1, 2))
    for i, inputs in enumerate([first, first, second, first]):
        inputs["x"][0] += i
        assert_same(program.run(inputs), chosen_rows(paddle.to_tensor(inputs["x"]), inputs["indices"]))


def test_refused_inputs_are_refused_again_and_leave_nothing_behind(recorder: Recorder) -> None:
    program = record_chosen_rows(recorder)
    good = {"x": rows(2), "indices": np.array([1], np.int32)}
    wrong = {"x": rows(5).astype(np.float64), "indices": np.array([4, 0], np.int32)}
    for inputs in (good, wrong, wrong, good):
        if inputs is wrong:
            with pytest.raises(ValueError, match="x: expected contiguous"):
                program.run(inputs)
        else:
            assert_same(program.run(inputs), chosen_rows(paddle.to_tensor(inputs["x"]), inputs["indices"]))


def test_an_output_stays_what_it_is_when_the_program_has_moved(recorder: Recorder) -> None:
    """A larger run gets other memory; what the run before returned is not torn away."""
    program = record_chosen_rows(recorder)
    none = np.zeros(0, np.int32)
    first = program.run({"x": rows(2), "indices": none})[0]
    wanted = first.numpy().copy()
    program.run({"x": rows(5000, seed=1), "indices": none})
    np.testing.assert_array_equal(first.numpy(), wanted)


def test_a_run_without_memory_leaves_the_program_as_it_was(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run fails again instead of writing past the arena, and smaller ones go on."""
    program = record_chosen_rows(recorder)
    large, small = ({"x": rows(n, seed=n), "indices": np.zeros(1, np.int32)} for n in (1000, 5))
    wanted = {n: chosen_rows(paddle.to_tensor(x["x"]), x["indices"]) for n, x in (("large", large), ("small", small))}

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(arena, "aligned_zeros", refuse)
        for _ in range(2):
            with pytest.raises(MemoryError):
                program.run(large)
        assert_same(program.run(small), wanted["small"])
    assert_same(program.run(large), wanted["large"])


def test_programs_that_share_an_arena_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever makes it grow; outputs of both lie at the same address, and memory without an output is freed."""
    taken: list[weakref.ref[Any]] = []

    def noted(*args: Any) -> Any:
        array = aligned_zeros(*args)
        taken.append(weakref.ref(array.base))
        return array

    monkeypatch.setattr(arena, "aligned_zeros", noted)
    shared = arena.Arena()
    programs = [record_chosen_rows(Recorder(LOWERINGS), shared) for _ in range(2)]
    for turn, num_tokens in enumerate((3, 200, 3, 1000, 1000, 5000, 2)):
        x, indices = rows(num_tokens, seed=turn), np.zeros(2, np.int32)
        got = programs[turn % 2].run({"x": x, "indices": indices})
        assert_same(got, chosen_rows(paddle.to_tensor(x), indices))
        assert shared.memory.data_ptr() <= got[0].data_ptr() < shared.memory.data_ptr() + shared.memory.shape[0]
    assert shared.generation == len(taken) - 1 == 4
    del got
    assert [ref() is None for ref in taken] == [True] * 4 + [False]


def test_slices_that_are_copies_are_refused_when_a_program_is_made(recorder: Recorder) -> None:
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        with pytest.raises(ConfigError, match="FLAGS_use_stride_kernel: expected 1"):
            record_chosen_rows(recorder)
    finally:
        paddle.set_flags({"FLAGS_use_stride_kernel": True})


def test_a_timed_run_names_every_call(recorder: Recorder) -> None:
    program = record_chosen_rows(recorder)
    names, nanoseconds = program.timed_run({"x": rows(2), "indices": np.zeros(1, np.int32)})
    assert names == (*["rms_norm"] * 4, "gather_output_rows", "swiglu")
    assert len(nanoseconds) == len(names)
    assert (nanoseconds > 0).all()


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": rows(2)}, r"inputs: expected indices, x, got x"),
        (
            {"x": rows(2).astype(np.float64), "indices": np.zeros(1, np.int32)},
            r"x: expected contiguous .*float32, got float64",
        ),
        (
            {"x": rows(2)[:, :60], "indices": np.zeros(1, np.int32)},
            r"x: expected shape \[num_tokens, 64\] .*got \[2, 60\]",
        ),
        ({"x": rows(2)[0], "indices": np.zeros(1, np.int32)}, r"x: expected shape .*got \[64\]"),
        ({"x": rows(4)[::2], "indices": np.zeros(1, np.int32)}, r"x: expected contiguous"),
        ({"x": rows(2), "indices": np.zeros(1, np.int64)}, r"indices: expected contiguous .*int32, got int64"),
    ],
)
def test_an_input_must_be_as_declared(recorder: Recorder, inputs: dict[str, Any], text: str) -> None:
    program = record_chosen_rows(recorder)
    with pytest.raises(ValueError, match=text):
        program.run(inputs)


def test_inputs_must_agree_on_their_sizes(recorder: Recorder) -> None:
    count = Size("n")
    offsets = recorder.add_input("offsets", paddle.int32, (count + 1,))
    x = recorder.add_input("x", paddle.float32, (count, WIDTH))
    program = Program(recorder, [gather_output_rows(x, offsets)])
    zeros = np.zeros(4, np.int32)
    assert program.run({"offsets": zeros, "x": rows(3)})[0].shape == [4, WIDTH]
    with pytest.raises(ValueError, match=r"x: expected shape \[n, 64\] with n = 3, got \[4, 64\]"):
        program.run({"offsets": zeros, "x": rows(4)})


def test_an_op_that_refuses_its_arguments_is_named(recorder: Recorder) -> None:
    program = record_chosen_rows(recorder)
    with pytest.raises(
        ValueError, match=r"call 4 \(gather_output_rows\): indices: expected rows of x, got one outside"
    ):
        program.run({"x": rows(2), "indices": np.array([2], np.int32)})
    program.run({"x": rows(3), "indices": np.array([2], np.int32)})


# ---- what cannot be recorded ----------------------------------------------------------------------------------------


def test_an_op_without_lowering_is_refused_by_name(recorder: Recorder) -> None:
    x = matrix(recorder)
    with pytest.raises(
        RecordingError, match=r"op top_p_candidates: expected one of rms_norm, .* while a pass is recorded$"
    ):
        shim.run("top_p_candidates", x)
    with pytest.raises(RecordingError, match=r"op rms_nrom: .* \(did you mean 'rms_norm'\?\)"):
        shim.run("rms_nrom", x)


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
        Program(recorder, [normed, x])
    with pytest.raises(RecordingError, match=r"output .*: expected a tensor of the recording, got one of another"):
        Program(recorder, [matrix(Recorder(LOWERINGS))])


def test_shapes_and_dtypes_are_checked_when_recording(recorder: Recorder) -> None:
    x = matrix(recorder)
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected shape \[64\], got \[32\]"):
        rms_norm(x, paddle.ones([32]), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected .*float32, got .*bfloat16"):
        rms_norm(x, paddle.ones([WIDTH], dtype="bfloat16"), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: residual: expected shape \[num_tokens, 64\], got \[rows, 64\]"):
        rms_norm(x, paddle.ones([WIDTH]), 1e-5, recorder.add_tensor(paddle.float32, (Size("rows"), WIDTH)))
    with pytest.raises(ValueError, match=r"swiglu: gate_up: expected \[T, 2 \* I\], got"):
        swiglu(matrix(recorder, "odd", 63))


def test_tensors_of_two_recordings_do_not_mix(recorder: Recorder) -> None:
    other = matrix(Recorder(LOWERINGS))
    with pytest.raises(
        ValueError, match="residual: expected a tensor of the pass that is recorded, got one of another"
    ):
        rms_norm(matrix(recorder), paddle.ones([WIDTH]), 1e-5, other)
