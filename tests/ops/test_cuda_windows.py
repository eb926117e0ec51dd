"""Memory of a GPU that another process shares, which may say less than the truth about it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.sharing import handle_of, open_verified, take_shareable

pytestmark = pytest.mark.slow

_NUM_BYTES = 2 << 20
# Shares so much, says how, and waits.
_SHARES = f"""
import pathlib, sys
from fastdeploy_sd.device.cuda.library import load
from fastdeploy_sd.device.cuda.sharing import handle_of, take_shareable
library = load(pathlib.Path(sys.argv[1]))
memory = take_shareable(library, {_NUM_BYTES})
print(handle_of(library, memory).hex(), flush=True)
sys.stdin.read()
"""


def test_a_window_is_as_long_as_the_driver_says(gpu: CudaDevice) -> None:
    command = [sys.executable, "-c", _SHARES, str(gpu.library.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        handle = bytes.fromhex(process.stdout.readline())
        assert open_verified(gpu.library, handle, _NUM_BYTES).num_bytes == _NUM_BYTES
        with pytest.raises(ValueError, match=f"expected one of {_NUM_BYTES + 1} bytes, got one of {_NUM_BYTES}"):
            open_verified(gpu.library, handle, _NUM_BYTES + 1)
        own = take_shareable(gpu.library, _NUM_BYTES)
        for other in (handle[:-1], handle_of(gpu.library, own)):
            with pytest.raises(ValueError, match=r"expected|invalid"):
                open_verified(gpu.library, other, _NUM_BYTES)
