"""Every op that has a CUDA kernel, over the CPU's cases: emulated, and on a GPU where there is one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.types.ranges import COUNTS, SliceRule
from tests.ops.cases.case import Kwargs, OpCases
from tests.ops.cuda_device import SMALL_CASES, OpRunner, emulated
from tests.ops.sampling_arrays import build_sampling_arrays
from tests.ops.test_ops import BY_ROW, OPS, assert_same, bits

pytestmark = pytest.mark.slow

# Ops that need more shared memory than GPUs have, for activations that none serves.
NO_GPU: Mapping[str, Callable[[Kwargs], bool]] = {
    "cascade_append_attention over latents": lambda case: (
        case["q"].dtype == np.float32 and case["cache"].head_dim > 256
    ),
}
ON_CUDA = [name for name, op in OPS.items() if emulated().has(name.split()[0])]


def _is_large_attention(case: Kwargs) -> bool:
    """Many rows; and of activations of float32, which share all code with others, what is not small."""
    limit = 30 if case["q"].dtype == np.float32 and case["cache"].k.dtype == np.float32 else 150
    return case["cache"].first_key in (1, 2, 63) or len(case["q"]) > limit


# Cases whose work a fiber per thread would take too long for; a GPU runs all. Op -> whether a case is left out.
TOO_LARGE: Mapping[str, Callable[[Kwargs], bool]] = {
    "cascade_append_attention": _is_large_attention,
    "cascade_append_attention over int8": _is_large_attention,
    "cascade_append_attention over latents": lambda case: case["q"].size > 40_000 or case["seq_lens"].size > 12,
    "sample": lambda case: case["logits"].shape[1] > 9000 and "drafted" not in case,
    "top_p_candidates": lambda case: case["logits"].shape[1] > 9000 or case["max_candidate_len"] > 500,
}


def inputs_of(op: OpCases, device: OpRunner) -> dict[str, Kwargs]:
    has_time = device is not emulated() and SMALL_CASES not in os.environ
    is_left_out = _is_none if has_time else TOO_LARGE.get(op.name, _is_none)
    has_none = NO_GPU.get(op.name, _is_none)
    return {name: case for name, case in op.inputs.items() if not is_left_out(case) and not has_none(case)}


def _is_none(_: Kwargs) -> bool:
    return False


@pytest.mark.parametrize("name", ON_CUDA)
def test_matches_reference(name: str, device: OpRunner) -> None:
    op = OPS[name]
    for case, kwargs in inputs_of(op, device).items():
        with device.runs_ops():
            got = op.run(kwargs)
        assert_same(got, op.run_reference(kwargs), op, f"{name} {case}")


@pytest.mark.parametrize("name", [name for name in ON_CUDA if name in BY_ROW])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, device: OpRunner) -> None:
    op, rng = OPS[name], np.random.default_rng(0)
    cases = inputs_of(op, device)
    for case, kwargs in itertools.islice(cases.items(), 0, None, max(1, len(cases) // 12)):
        count = op.num_rows(kwargs)
        order = rng.permutation(count).tolist()
        for size in {size for size in (2, min(count, 17)) if 1 < size <= count}:
            rows = order[:size]
            with device.runs_ops():
                alone = [op.run_rows(op.copied(kwargs), [row]) for row in rows[:4]]
                together = op.run_rows(op.copied(kwargs), rows)
            for got, *want in zip(together, *alone, strict=True):
                one_by_one = np.concatenate(want)
                np.testing.assert_array_equal(bits(got[: len(one_by_one)]), bits(one_by_one), err_msg=f"{name} {case}")


def test_draws_have_the_same_bits_alone_and_in_any_company(device: OpRunner) -> None:
    """Also behind a first wave of rows, whose memory for rules the others use again."""
    rng = np.random.default_rng(3)
    vocab, count, copies = 40, 23, 12
    logits, positions = rng.standard_normal((count, vocab), np.float32) * 3, np.arange(count, dtype=np.int32)
    columns = {
        "temperature": rng.choice([0.0, 1.0, 2.0], count),
        "top_p": rng.choice([1.0, 0.7], count),
        "frequency_penalty": rng.choice([0.0, 1.0], count),
        "count_rows": rng.choice([-1, 0, 1], count),
        "token_counts": rng.integers(0, 3, (2, vocab)),
    }

    def run(rows: np.ndarray) -> list[np.ndarray]:
        sampling = build_sampling_arrays(count, len(rows), vocab=vocab, **columns)
        step = (logits[rows], rows, positions[rows], sampling)
        listed = native.top_p_candidates(*step, 5)
        return [native.sample(*step), *listed, *native.token_logprobs(logits, rows, rows, 4)]

    requests = np.arange(count, dtype=np.int32)
    with device.runs_ops():
        alone = [run(requests[row : row + 1]) for row in range(count)]
        together = run(np.tile(requests, copies))
    for got, *want in zip(together, *alone, strict=True):
        np.testing.assert_array_equal(bits(got), bits(np.concatenate(want * copies)))


def test_experts_have_the_same_bits_for_more_tokens_than_go_through_them_together(device: OpRunner) -> None:
    case = next(case for name, case in OPS["moe_ffn"].inputs.items() if name == "bfloat16-2-slices")
    few, copies = case["x"], 2100 // len(case["x"])
    with device.runs_ops():
        want, got = (OPS["moe_ffn"].function(**{**case, "x": x}) for x in (few, np.tile(few, (copies, 1))))
    np.testing.assert_array_equal(got, np.tile(want, (copies, 1)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("fmt", LINEAR_FORMATS[1:])  # float32 has tiles of one height
def test_linear_has_the_same_bits_for_any_number_of_rows(fmt: LinearFormat, count: int, device: OpRunner) -> None:
    """Kernels for few and for many rows, and tiles of all their heights: 8, 32, 64 and 128."""
    rng = np.random.default_rng(5)
    x: np.ndarray = rng.standard_normal((130, 1300), np.float32)
    packed = pack_linear(rng.standard_normal((72, 1300), np.float32), fmt, SliceRule(count, 130))
    with device.runs_ops():
        want = linear(x, packed)
        for rows in (1, 8, 9, 64):
            np.testing.assert_array_equal(bits(linear(x[:rows], packed)), bits(want[:rows]), err_msg=f"{rows} rows")


def test_emulated_ops_run_kernels() -> None:
    """Not the CPU's own, which give the same."""
    op = OPS["rms_norm"]
    before = emulated().num_launches()
    with emulated().runs_ops():
        op.run(op.inputs["float32-3x17-plain"])
    assert emulated().num_launches() == before + 1


def test_ops_that_are_declared_are_tested() -> None:
    names = {"".join(part.capitalize() for part in name.split()[0].split("_")) for name in ON_CUDA}
    # These have no kernel for a CPU, or one that is no op of a pass, and so no case that all backends run:
    # test_cuda_ngram.py, test_cuda_packing.py.
    assert names | {"NgramMatch", "PackIntegers", "PackLinear"} == set(cuda_build.op_names())
