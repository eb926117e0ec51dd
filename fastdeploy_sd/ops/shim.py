"""Calls the Paddle operators, once they are loaded: what the model's Python runs when no recording is replayed.

Nothing is found, compiled or loaded inside a call. Who will call operators loads them first, when the model is loaded.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import time
from typing import Any

import paddle
from paddle import _C_ops
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.operators import PaddleInstall, find_or_compile
from fastdeploy_sd.ops.recorder import recorder_of

_log = logging.getLogger(__name__)


class OperatorsNotLoadedError(RuntimeError):
    """An operator was called although nobody has loaded them: a mistake in our own code, found at the first call."""


@functools.cache
def load() -> None:
    """Make the `fdsd_*` operators available to Paddle, once per process; compiles them if no file that fits is there.

    Raises:
        ConfigError: no such file and no C++ compiler, a failed build, or a missing kernel library.
    """
    begin = time.perf_counter()
    library.library()
    path = find_or_compile(installed_paddle())
    load_op_meta_info_and_register_op(str(path))
    _log.info("loaded the Paddle operators in %.1f s from %s", time.perf_counter() - begin, path)


def installed_paddle() -> PaddleInstall:
    """Return what the imported Paddle says of itself."""
    return PaddleInstall(pathlib.Path(paddle.__file__).parent, paddle.__version__, paddle.version.commit)


def run(name: str, *args: Any) -> list[Any]:
    """Call operator `fdsd_<name>`: input tensors (None for an absent optional one), then attributes.

    With a symbolic tensor among the inputs the call is recorded instead; see ops/recorder.py.

    Raises:
        ValueError: the operator refused its arguments.
        RecordingError: the operator cannot be recorded.
        OperatorsNotLoadedError: `load` has not returned.
    """
    recorder = recorder_of(args)
    if recorder is not None:
        return recorder.run(name, args)
    if load.cache_info().currsize == 0:
        raise OperatorsNotLoadedError(f"op {name}: expected load() when the model is loaded, got a call without it")
    out: list[Any] = _C_ops._run_custom_op(f"fdsd_{name}", *args)
    return out
