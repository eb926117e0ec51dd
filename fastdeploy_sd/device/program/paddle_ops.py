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
from paddle import Tensor, _C_ops
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from fastdeploy_sd.device.layout import layout
from fastdeploy_sd.device.program import operator_files
from fastdeploy_sd.device.program.declaration import Declaration
from fastdeploy_sd.device.program.operator_files import PaddleInstall
from fastdeploy_sd.device.program.operator_source import operator_source

_log = logging.getLogger(__name__)


class OperatorsNotLoadedError(RuntimeError):
    """An operator was called before `load`: a mistake in our own code, found at the first call."""


@functools.cache
def load(ops: tuple[Declaration, ...]) -> None:
    """Make the operators `fdsd_<op>` of these ops available to Paddle, once per process.

    Compiles them if no file that fits is there. Raises ConfigError: no such file and no C++ compiler, a failed build, a
    missing kernel library, or one that is not what the ops declare.
    """
    begin = time.perf_counter()
    headers = (header.name for header in operator_files.headers(operator_files.source_root()))
    source = operator_source(ops, headers, layout)
    path = operator_files.find_or_compile(installed_paddle(), source)
    load_op_meta_info_and_register_op(str(path))
    _log.info("loaded the Paddle operators in %.1f s from %s", time.perf_counter() - begin, path)


def installed_paddle() -> PaddleInstall:
    """Return what the imported Paddle says of itself."""
    return PaddleInstall(pathlib.Path(paddle.__file__).parent, paddle.__version__, paddle.version.commit)


def run(name: str, *args: Any) -> list[Tensor]:
    """Call operator `fdsd_<name>`: input tensors (None for an absent optional one), then attributes.

    Raises ValueError: the operator refused its arguments; OperatorsNotLoadedError: `load` has not returned.
    """
    if load.cache_info().currsize == 0:
        raise OperatorsNotLoadedError(f"op {name}: expected load() when the model is loaded, got a call without it")
    return _C_ops._run_custom_op(f"fdsd_{name}", *args)
