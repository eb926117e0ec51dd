"""A row of swiglu has the same bits alone and in a batch, with any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.native import activation as native
from tests.ops.backends import isa, threads
from tests.ops.cases.activation import SWIGLU


@pytest.mark.parametrize("name", SWIGLU.inputs)
@pytest.mark.parametrize("level", library.available_isas())
def test_swiglu_rows_do_not_depend_on_the_batch(level: str, name: str) -> None:
    x = SWIGLU.inputs[name]["gate_up"]
    with isa(level):
        for count in (1, 2, 3):
            with threads(count):
                together = native.swiglu(x)
            for row in range(len(x)):
                np.testing.assert_array_equal(native.swiglu(x[row : row + 1])[0], together[row])
