"""Passes on a GPU as graphs: sizes that are rounded up, rows that fill them, and what is launched again."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, Literal

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device.cuda import program as cuda_program
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.sizes import rounded
from fastdeploy_sd.device.program.program import Padding, Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.rowwise import rms_norm
from fastdeploy_sd.types import F32

pytestmark = pytest.mark.slow

WIDTH, MAX_TOKENS, MAX_ROWS, VOCAB = 32, 21, 9, 13
TABLE = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
PADDING: dict[str, int | Literal["last"]] = {"input_ids": 0, "indices": 0, "slots": -1, "offsets": "last"}


class Step:
    """An embedding, a norm, and a choice of rows; no kernel reads `slots` and `offsets`."""

    def __init__(self, gpu: CudaDevice, padding: Padding | None) -> None:
        recorder, tokens, chosen = Recorder(), Size("num_tokens"), Size("num_rows")
        ids: Any = recorder.add_input("input_ids", paddle.int32, (tokens,))
        indices: Any = recorder.add_input("indices", paddle.int32, (chosen,))
        recorder.add_input("slots", paddle.int64, (tokens,))
        recorder.add_input("offsets", paddle.int32, (chosen + 1,))
        h, _ = rms_norm(gather_output_rows(gpu.wrap(TABLE), ids), gpu.wrap(np.ones(WIDTH, np.float32)), 1e-5)
        outputs: Any = h, gather_output_rows(h, indices)
        self.recording = Recording(recorder, outputs, {"num_tokens": MAX_TOKENS, "num_rows": MAX_ROWS}, padding)
        self.gpu = gpu
        # Full of what would be wrong: a row that is not filled is read outside of the table.
        self.columns = {
            "input_ids": gpu.buffer(np.full(MAX_TOKENS, 1 << 20, np.int32)),
            "indices": gpu.buffer(np.full(MAX_ROWS, 1 << 20, np.int32)),
            "slots": gpu.buffer(np.full(MAX_TOKENS, 5, np.int64)),
            "offsets": gpu.buffer(np.full(MAX_ROWS + 1, 5, np.int32)),
        }
        self.inputs = {name: mirror.tensor for name, mirror in self.columns.items()}
        self.program = gpu.program(self.recording, self.inputs)

    def run(self, num_tokens: int, num_rows: int, seed: int = 0) -> list[F32]:
        rng = np.random.default_rng(seed)
        contents = {
            "input_ids": rng.integers(0, VOCAB, num_tokens),
            "indices": rng.integers(0, num_tokens, num_rows),
            "slots": np.arange(num_tokens) + 70,
            "offsets": np.arange(num_rows + 1) * 3,
        }
        for name, values in contents.items():
            self.columns[name].array[: len(values)] = values
            self.columns[name].array[len(values) :] = 1 << 20
            self.columns[name].upload()
        self.program.run({"num_tokens": num_tokens, "num_rows": num_rows})
        counts = (num_tokens, num_rows)
        return [self.gpu.read(out[:count]) for out, count in zip(self.program.outputs, counts, strict=True)]


def test_sizes_are_rounded_up_by_at_most_a_half() -> None:
    assert [rounded(size, 100) for size in range(10)] == [0, 1, 2, 3, 4, 6, 6, 8, 8, 12]
    for size, bound in itertools.product(range(1, 700), (700, 701)):
        assert size <= rounded(size, bound) <= min(max(size * 3 // 2, 1), bound)
    assert rounded(690, 700) == 700
    assert [rounded(size, 9000) for size in (512, 513, 640, 641, 8193)] == [512, 640, 640, 768, 8320]
    assert len({rounded(size, 700) for size in range(701)}) == 21


def test_rows_that_fill_a_size_change_no_bit(gpu: CudaDevice) -> None:
    """Nor does what was in a graph before, in whatever order sizes come."""
    plain, padded = Step(gpu, None), Step(gpu, PADDING)
    cases = [(5, 2), (1, 1), (21, 9), (6, 2), (5, 3), (13, 0), (9, 7), (5, 2), (17, 5), (6, 1), (5, 1), (5, 4), (1, 1)]
    for seed, (num_tokens, num_rows) in enumerate(cases):
        for got, want in zip(
            padded.run(num_tokens, num_rows, seed), plain.run(num_tokens, num_rows, seed), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    buckets = Counter((rounded(tokens, MAX_TOKENS), rounded(count, MAX_ROWS)) for tokens, count in cases)
    assert len(padded.program._graphs) == sum(times > 1 for times in buckets.values()) > 1
    assert buckets[6, 2] > 2, "a graph is launched again"
    assert len(plain.program._graphs) == 0


def test_columns_are_filled_as_the_recording_says(gpu: CudaDevice) -> None:
    step = Step(gpu, PADDING)
    step.run(5, 3)
    step.run(5, 2)
    step.run(5, 5)
    read = {name: gpu.read(tensor) for name, tensor in step.inputs.items()}
    np.testing.assert_array_equal(read["slots"][:7], [*range(70, 75), -1, 1 << 20])
    np.testing.assert_array_equal(read["offsets"][:8], [0, 3, 6, 9, 12, 15, 15, 1 << 20])
    assert read["input_ids"][5] == 0
    np.testing.assert_array_equal(read["indices"][5:7], [0, 1 << 20])


def test_a_size_beyond_its_bound_is_refused(gpu: CudaDevice) -> None:
    with pytest.raises(ValueError, match=r"sizes: expected num_tokens in 0\.\.21, got 22"):
        Step(gpu, PADDING).program.run({"num_tokens": 22, "num_rows": 1})


def test_what_an_op_refuses_shows_before_anything_runs(gpu: CudaDevice) -> None:
    step = Step(gpu, PADDING)
    norm = next(call for call in step.recording.recorder.calls if call.op == "rms_norm")
    norm.params.hidden_size = 0
    with pytest.raises(ValueError, match=r"rms_norm.*hidden_size: expected a positive number"):
        gpu.program(step.recording, step.inputs)
    norm.params.hidden_size = WIDTH
    assert len(step.run(4, 2)[0]) == 4


def test_a_pass_of_which_no_graph_can_be_made_runs_all_the_same(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, made, num_refused = Step(gpu, PADDING), CudaLibrary.made, 0

    def refuse(self: CudaLibrary, name: str, *arguments: object) -> int:
        nonlocal num_refused
        if name == "program_capture":
            num_refused += 1
            raise ValueError("out of memory")
        return made(self, name, *arguments)

    want = step.run(4, 2)
    monkeypatch.setattr(CudaLibrary, "made", refuse)
    for _ in range(3):
        for part, expected in zip(step.run(4, 2), want, strict=True):
            np.testing.assert_array_equal(part, expected)
    assert len(step.program._graphs) == 0
    assert num_refused == 1  # not tried in every step


def test_graphs_that_were_not_used_for_long_are_given_up(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_program, "MAX_GRAPHS", 2)
    monkeypatch.setattr(cuda_program, "MAX_SEEN", 3)
    step = Step(gpu, PADDING)
    want = step.run(4, 2)
    for num_tokens in (8, 4, 12, 4, 8, 12, 4, 8):
        got = step.run(num_tokens, 2)
        assert len(step.program._graphs) <= 2
    assert len(step.program._graphs) == 2
    for num_tokens in (1, 2, 3, 16):
        step.run(num_tokens, 1)
    assert len(step.program._graphs._seen) == 3
    for part, expected in zip(step.run(4, 2), want, strict=True):
        np.testing.assert_array_equal(part, expected)
    assert len(got[0]) == 8


def test_a_timed_run_names_what_fills_columns_too(gpu: CudaDevice) -> None:
    step = Step(gpu, PADDING)
    step.run(3, 1)
    names, nanoseconds = step.program.timed_run({"num_tokens": 3, "num_rows": 1})
    assert names == ("pad_columns", "pad_columns", "gather_output_rows", "rms_norm", "gather_output_rows")
    assert len(nanoseconds) == len(names)


@pytest.mark.parametrize(
    ("padding", "text"),
    [
        ({"input_ids": 0}, "padding: expected indices, input_ids, offsets, slots, got input_ids"),
        (PADDING | {"slots": "last"}, "padding: slots: expected a number where a step may have no row, got last"),
    ],
)
def test_padding_must_be_complete_and_possible(gpu: CudaDevice, padding: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Step(gpu, padding)
