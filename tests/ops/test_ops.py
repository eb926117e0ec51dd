"""Every op, every case, every backend against its NumPy meaning: integers exactly, floats by the op's tolerance."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.bf16 import from_bf16
from tests.ops import cases
from tests.ops.backends import isa
from tests.ops.cases.case import OpCases


def all_ops() -> Iterator[OpCases]:
    for module in pkgutil.iter_modules(cases.__path__):
        found = importlib.import_module(f"{cases.__name__}.{module.name}")
        yield from (value for value in vars(found).values() if isinstance(value, OpCases))


OPS = {op.name: op for op in all_ops()}
ISAS = library.available_isas()
RUNS = [(name, backend) for name, op in OPS.items() for backend in [*ISAS, *(["paddle"] if op.paddle else [])]]


def assert_same(got: Any, want: Any, op: OpCases, where: str) -> None:
    gots, wants = (out if isinstance(out, tuple) else (out,) for out in (got, want))
    assert len(gots) == len(wants)
    for i, (g, w) in enumerate(zip(gots, wants, strict=True)):
        if w is None:
            continue
        assert g.shape == w.shape, f"{where} output {i}"
        assert g.dtype == w.dtype, f"{where} output {i}"
        if w.dtype == np.float32:
            np.testing.assert_allclose(g, w, rtol=op.rtol, atol=op.atol, err_msg=f"{where} output {i}")
        elif w.dtype == np.uint16:
            rtol = op.bf16_ulps * 2.0**-7
            atol = op.atol if op.bf16_atol is None else op.bf16_atol
            np.testing.assert_allclose(from_bf16(g), from_bf16(w), rtol=rtol, atol=atol, err_msg=f"{where} output {i}")
        else:
            np.testing.assert_array_equal(g, w, err_msg=f"{where} output {i}")


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_matches_reference(name: str, backend: str) -> None:
    op = OPS[name]
    for case, kwargs in op.inputs.items():
        want = op.reference(**kwargs)
        if backend == "paddle":
            assert op.paddle is not None
            got = op.paddle(**kwargs)
        else:
            with isa(backend):
                got = op.native(**kwargs)
        assert_same(got, want, op, f"{name} {backend} {case}")
