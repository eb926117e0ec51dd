"""Every op, every case, every backend against its NumPy meaning, and every row alone against itself in a batch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops.bf16 import from_bf16, widen
from tests.ops import cases
from tests.ops.backends import LEVELS, isa, threads
from tests.ops.cases.case import OpCases, arrays


def all_ops() -> Iterator[OpCases]:
    for module in pkgutil.iter_modules(cases.__path__):
        found = importlib.import_module(f"{cases.__name__}.{module.name}")
        yield from (value for value in vars(found).values() if isinstance(value, OpCases))


OPS = {op.name: op for op in all_ops()}
# Ops that level amx runs on tiles; it is avx512 for the others.
ON_TILES = (
    *("linear", "head_linear", "moe_ffn", "combine_experts", "cascade_append_attention"),
    *("cascade_append_attention over int8", "cascade_append_attention over latents"),
)


def levels_of(name: str) -> tuple[str, ...]:
    return LEVELS if name in ON_TILES else library.available_isas()


RUNS = [
    (name, backend)
    for name, op in OPS.items()
    for backend in [*levels_of(name), *(["paddle"] if op.is_operator else [])]
]
# Also more than one group of them, and more than there are processors.
NUM_THREADS = (1, 2, 3, 9, 64)
BY_ROW = [name for name, op in OPS.items() if any(map(op.num_rows, op.inputs.values()))]


def assert_same(got: Sequence[np.ndarray], want: Sequence[np.ndarray], op: OpCases, where: str) -> None:
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape, f"{where} output {i}"
        assert g.dtype == w.dtype, f"{where} output {i}"
        if w.dtype == np.float32:
            np.testing.assert_allclose(g, w, rtol=op.rtol, atol=op.atol, err_msg=f"{where} output {i}")
        elif w.dtype == np.uint16:
            rtol = op.bf16_ulps * 2.0**-7
            atol = op.atol if op.bf16_atol is None else op.bf16_atol
            np.testing.assert_allclose(from_bf16(g), from_bf16(w), rtol=rtol, atol=atol, err_msg=f"{where} output {i}")
        elif w.dtype == np.float16:
            rtol = op.bf16_ulps * 2.0**-10
            atol = op.atol if op.bf16_atol is None else op.bf16_atol * 2.0**-3
            atol += op.bf16_ulps * 2.0**-24  # a unit of subnormal numbers
            np.testing.assert_allclose(widen(g), widen(w), rtol=rtol, atol=atol, err_msg=f"{where} output {i}")
        else:
            np.testing.assert_array_equal(g, w, err_msg=f"{where} output {i}")


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_matches_reference(name: str, backend: str) -> None:
    op = OPS[name]
    for case, kwargs in op.inputs.items():
        want = op.run_reference(kwargs)
        if backend == "paddle":
            got = op.run_operator(kwargs)
        else:
            with isa(backend):
                got = op.run(kwargs)
        assert_same(got, want, op, f"{name} {backend} {case}")


@pytest.mark.parametrize(("name", "level"), [(name, level) for name in BY_ROW for level in levels_of(name)])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, level: str) -> None:
    op, rng = OPS[name], np.random.default_rng(0)
    for case, kwargs in op.inputs.items():
        count = op.num_rows(kwargs)
        order = rng.permutation(count).tolist()
        one_by_one = op.copied(kwargs)
        with isa(level):
            alone = [op.run_rows(one_by_one, [row]) for row in range(count)]
        for size in {size for size in (2, 3, 5, 8, 13, count // 2, count) if size <= count}:
            rows, num_threads = order[:size], NUM_THREADS[size % len(NUM_THREADS)]
            together = op.copied(kwargs)
            with isa(level), threads(num_threads):
                got = op.run_rows(together, rows)
            want = [np.concatenate(outputs) for outputs in zip(*(alone[row] for row in rows), strict=True)]
            if len(rows) == count > 0:
                got, want = [*got, *arrays(tuple(together.values()))], [*want, *arrays(tuple(one_by_one.values()))]
            for i, (g, w) in enumerate(zip(got, want, strict=len(rows) > 0)):
                np.testing.assert_array_equal(bits(g), bits(w), err_msg=f"{name} {case} output {i}")


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32) if array.dtype == np.float32 else array
