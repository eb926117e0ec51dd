"""Stands in for Paddle where it is not installed: on a GPU only the names of element types are used.

The folder above is on the path then. What computes on the host's tensors, which are Paddle's, fails and says so: a
model on a CPU, and operators called one by one.
"""

from __future__ import annotations

import sys
import types
from typing import NoReturn


class dtype:  # noqa: N801 (Paddle's name)
    """An element type; its text is what Paddle's is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"paddle.{self._name}"


class Tensor:
    """Nothing is one."""


def _missing(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("expected Paddle for memory and operators of the host, got its names only")


def disable_signal_handler() -> None:
    """There is none."""


bfloat16, float16, float32, float64 = map(dtype, ("bfloat16", "float16", "float32", "float64"))
int8, uint8, int16, int32, int64 = map(dtype, ("int8", "uint8", "int16", "int32", "int64"))
bool = dtype("bool")
float8_e4m3fn = dtype("float8_e4m3fn")
empty = _missing
__version__ = "none"


def _module(name: str, **attributes: object) -> None:
    module = types.ModuleType(f"{__name__}.{name}")
    vars(module).update(attributes)
    sys.modules[module.__name__] = module
    parent, _, own = module.__name__.rpartition(".")
    setattr(sys.modules[parent], own, module)


_module("version", commit="none")
_module("_C_ops")
_module("base")
_module("base.core", frombuffer=_missing)
_module("utils")
_module("utils.cpp_extension", load_op_meta_info_and_register_op=_missing)
