"""One rank of a group with a GPU each, in a process without Paddle: does what the lines of its standard input say.

Usage: python -m tests.ops.gpu_rank_process FD RANK SIZE TIMEOUT_S

$FDSD_CUDA_LIBRARY names the library, and the rank's number is its GPU's. What it says first is its handle, in hex.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.types.ranges import halved
from tests.ops.rank_process import digest, serve, values


class GpuRank:
    """A rank, its GPU and its stream."""

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        self.library = CudaLibrary(pathlib.Path(os.environ["FDSD_CUDA_LIBRARY"]))
        self.library.call("use_device", ctypes.c_int32(rank))
        self.stream = self.library.made("stream_create")
        local = Communicator.shared(fd, rank, size)
        self.communicator = GpuCommunicator(self.library, self.stream, local, timeout_s, exchange)

    def place(self, array: np.ndarray) -> int:
        """Address of an array's copy on the GPU."""
        address = self.library.made("allocate", ctypes.c_int64(array.nbytes))
        self.library.call("copy", address, array.ctypes.data, ctypes.c_int64(array.nbytes))
        return address

    def run(self, op: str, y: np.ndarray, params: Any) -> str:
        """Run an op to its end, and return the digest of its y."""
        params.communicator, params.y = self.communicator.handle, self.place(y)
        self.library.launch(op, params, 0, self.stream)
        self.library.call("stream_synchronize", self.stream)
        self.communicator.verify()
        self.library.call("copy", y.ctypes.data, params.y, ctypes.c_int64(y.nbytes))
        return digest(y)

    def follow(self, order: str, arguments: dict[str, Any]) -> Any:
        """Do one thing and return the answer."""
        if order == "begin":
            self.communicator.begin(arguments["attempt"])
        elif order in ("fail", "abort", "close"):
            getattr(self.communicator, order)()
        elif order == "reduce":
            x = values(arguments["seed"], self.communicator.rank, arguments["rows"], arguments["columns"])
            params = struct_type("AllReduceParams")(num_rows=len(x), num_columns=x.shape[1], x=self.place(x))
            if (added := arguments.get("added")) is not None:
                params.bias = self.place(values(added, 0, 1, x.shape[1]))
                params.shared = self.place(values(added, 1, *x.shape))
            return self.run("all_reduce", np.full_like(x, np.nan), params)
        elif order == "gather":
            whole = columns_of(arguments)
            unit, dtype = arguments["unit"], whole.dtype
            own = halved(whole.shape[1], self.communicator.size, unit)[self.communicator.rank]
            x = np.ascontiguousarray(whole[:, own.start : own.stop])
            sizes = {"num_rows": len(x), "num_own": x.shape[1], "num_columns": whole.shape[1], "unit": unit}
            params = struct_type("AllGatherParams")(**sizes, dtype=int(dtype == np.uint16), x=self.place(x))
            return self.run("all_gather", np.zeros_like(whole), params)
        else:
            raise AssertionError(order)
        return None


def columns_of(arguments: dict[str, Any]) -> np.ndarray:
    """What all ranks gather."""
    x = values(arguments["seed"], 0, arguments["rows"], arguments["columns"])
    return x if arguments["dtype"] == "float32" else (x.view(np.uint32) >> 16).astype(np.uint16)


def exchange(handle: bytes) -> Sequence[bytes]:
    """Send it, and receive that of every rank."""
    print(json.dumps(handle.hex()), flush=True)
    found = [bytes.fromhex(text) for text in json.loads(sys.stdin.readline())["said"]]
    print(json.dumps("ready"), flush=True)
    return found


def main() -> int:
    fd, rank, size = map(int, sys.argv[1:4])
    serve(GpuRank(fd, rank, size, float(sys.argv[4])).follow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
