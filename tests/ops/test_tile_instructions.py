"""What was compiled for the chip's tiles gives the twin's bits: on the chip, and on a processor without AMX, where
another program executes the instructions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from custom_ops.build import BuildError, find_compiler
from fastdeploy_sd.device import library
from tests.ops.backends import LEVELS

pytestmark = pytest.mark.slow

TRAPS = Path(__file__).with_name("tile_traps.cc")


@pytest.mark.skipif("amx" not in LEVELS, reason="this processor has no AVX-512")
def test_code_for_the_chip_runs_and_has_the_bits_of_the_twin(tmp_path: Path) -> None:
    traps = [] if "amx" in library.available_isas() else [str(compiled_traps(tmp_path))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.run_tile_instructions", *traps], capture_output=True, text=True,
        cwd=Path(__file__).parents[2], timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def compiled_traps(folder: Path) -> Path:
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    traps = folder / "tile_traps.so"
    flags = ["-std=c++20", "-O2", "-mfma", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(TRAPS), "-o", str(traps)], check=True, timeout=120)
    return traps
