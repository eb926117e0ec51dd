"""The kernel library's process-wide settings and its thread pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.bf16 import from_bf16, to_bf16
from fastdeploy_sd.ops.rowwise import rms_norm
from tests.ops.backends import threads

PRINT_ISA = "from fastdeploy_sd.device import library; print(library.isa())"


def run_with(level: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRINT_ISA], env=os.environ | {"FDSD_ISA": level}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("level", library.available_isas())
def test_the_environment_variable_forces_a_level(level: str) -> None:
    done = run_with(level)
    assert (done.returncode, done.stdout.strip()) == (0, level), done.stderr


def test_an_unknown_level_is_an_error_that_lists_the_known() -> None:
    done = run_with("sse9")
    assert done.returncode != 0
    assert "FDSD_ISA: expected one of scalar, avx2, avx512, amx, got 'sse9'" in done.stderr


@pytest.mark.skipif("amx" in library.available_isas(), reason="this machine has level amx")
def test_level_amx_is_refused_with_the_reason() -> None:
    done = run_with("amx")
    assert done.returncode != 0
    lacks = "FDSD_ISA: isa: this processor lacks the requested instruction-set level, got 'amx'"
    assert f"{lacks} ({library.amx_refusal()})" in done.stderr


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_a_wrong_number_of_threads_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"expected 1\.\.1024, got {count}"):
        library.set_num_threads(count)


def test_ops_called_from_many_threads_at_once_do_not_mix() -> None:
    """The pool runs one job at a time; callers and late workers must never take part in another one's job."""
    rng = np.random.default_rng(0)
    weight = np.ones(64, np.float32)
    inputs = [rng.standard_normal((rows, 64)).astype(np.float32) for rows in range(1, 9)]
    with threads(4):
        wanted = [rms_norm(x, weight, 1e-5)[0] for x in inputs]
        wrong: list[int] = []

        def repeat(i: int) -> None:
            outputs = (rms_norm(inputs[i], weight, 1e-5)[0] for _ in range(300))
            wrong.extend(i for y in outputs if not np.array_equal(y, wanted[i]))

        callers = [threading.Thread(target=repeat, args=(i,)) for i in range(len(inputs))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


def test_bfloat16_rounds_to_nearest_even_and_keeps_specials() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    back = from_bf16(to_bf16(values))
    expected = [1.0, 1.0, 1.015625, -2.5, 0.0, -0.0, np.inf, -np.inf, np.nan, np.inf]
    np.testing.assert_array_equal(back, np.array(expected, np.float32))
    assert np.signbit(back[5])
