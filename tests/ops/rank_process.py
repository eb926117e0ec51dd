"""One rank of a group, in a process without Paddle: does what the lines of its standard input say.

Usage: python -m tests.ops.rank_process FD RANK SIZE TIMEOUT_S
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fastdeploy_sd.device import library
from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call
from fastdeploy_sd.types import F32


def values(seed: int, rank: int, rows: int, columns: int) -> F32:
    """What a rank adds to a sum."""
    x: F32 = np.random.default_rng([seed, rank]).standard_normal((rows, columns), np.float32)
    return x


def digest(data: Any) -> str:
    """What to compare results by."""
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def all_reduce(communicator: Communicator, x: F32) -> F32:
    """As ops.collective.all_reduce, which imports Paddle."""
    y = np.empty_like(x)
    params = struct_type("AllReduceParams")(
        communicator=communicator.handle,
        num_rows=x.shape[0],
        num_columns=x.shape[1],
        y_dtype=0,
        x=x.ctypes.data,
        y=y.ctypes.data,
    )
    call("all_reduce", params)
    return y


def follow(communicator: Communicator, order: str, arguments: dict[str, Any]) -> Any:
    """Do one thing and return the answer."""
    if order == "meet":
        return "ready"
    if order == "begin":
        communicator.begin(arguments["attempt"])
    elif order == "fail":
        communicator.fail()
    elif order == "abort":
        communicator.abort()
    elif order == "pin":
        os.sched_setaffinity(0, arguments["cores"])
    elif order == "reduce":
        x = values(arguments["seed"], communicator.rank, arguments["rows"], arguments["columns"])
        found = hashlib.blake2b(digest_size=16)
        for _ in range(arguments.get("times", 1)):
            y = all_reduce(communicator, x)
            found.update(y.tobytes())
        return found.hexdigest() if arguments.get("times", 1) > 1 else digest(y)
    else:
        raise AssertionError(order)
    return None


def serve(follow: Callable[[str, dict[str, Any]], Any]) -> None:
    """Answer every order until there is none."""
    for line in sys.stdin:
        arguments = json.loads(line)
        order = arguments.pop("order")
        try:
            answer = follow(order, arguments)
        except ValueError as error:
            answer = f"error: {error}"
        print(json.dumps(answer), flush=True)


def main() -> int:
    fd, rank, size = map(int, sys.argv[1:4])
    library.set_num_threads(1)
    communicator = Communicator.shared(fd, rank, size, float(sys.argv[4]))
    print(json.dumps(""), flush=True)
    serve(lambda order, arguments: follow(communicator, order, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
