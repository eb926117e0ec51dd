"""Records op calls instead of running them: what stands for tensors meanwhile, and what is known of each call.

A pass over a model is recorded by running its Python once on symbolic tensors. They have a dtype and a shape whose
first dimension is a named size, and no content: whatever looks at content, or decides by a size, is an error, so a pass
that can be recorded does the same for every step. Knows no single op and no memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import paddle
from paddle import Tensor

from fastdeploy_sd.device.device_tensor import DeviceTensor
from fastdeploy_sd.device.library import CParams


class RecordingError(TypeError):
    """The pass does something that cannot be recorded; the text names it."""


class Size:
    """A dimension that every run has its own value for: a named count, plus a constant."""

    __slots__ = ("extra", "name")

    def __init__(self, name: str, extra: int = 0) -> None:
        self.name, self.extra = name, extra

    def __add__(self, extra: int) -> Size:
        return Size(self.name, self.extra + extra)

    def __sub__(self, less: int) -> Size:
        return Size(self.name, self.extra - less)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Size):
            raise RecordingError(f"size {self}: expected no decision by it while a pass is recorded, got == {other!r}")
        return (self.name, self.extra) == (other.name, other.extra)

    def __hash__(self) -> int:
        return hash((self.name, self.extra))

    def __bool__(self) -> bool:
        raise RecordingError(f"size {self}: expected no decision by it while a pass is recorded, got one by its truth")

    def __repr__(self) -> str:
        return self.name if self.extra == 0 else f"{self.name} + {self.extra}"


Dim = int | Size
Shape = tuple[Dim, ...]


class SymbolicTensor:
    """Stands for a tensor in a pass that is recorded; `index` is its number among the recorder's tensors."""

    __slots__ = ("dtype", "index", "recorder", "shape")

    def __init__(self, recorder: Recorder, index: int, dtype: paddle.dtype, shape: Shape) -> None:
        self.recorder, self.index, self.dtype, self.shape = recorder, index, dtype, shape

    def __getattr__(self, name: str) -> NoReturn:
        # Python and NumPy probe for protocols. Any other name is looked up by the pass: as an AttributeError, hasattr
        # would decide by it in silence.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{name}: expected an attribute of a recorded tensor, got no such one")
        raise self._refusal(f".{name}")

    def __eq__(self, other: object) -> NoReturn:
        raise self._refusal("==")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise self._refusal("a decision by its truth")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self._refusal("its values as an array")

    def _refusal(self, what: str) -> RecordingError:
        return RecordingError(f"recorded tensor {list(self.shape)}: expected only ops of fastdeploy_sd.ops, got {what}")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One op call: its params, complete but for the fields that are sizes or symbolic tensors, by their offsets."""

    op: str
    params: CParams
    sizes: tuple[tuple[int, Size], ...]
    pointers: tuple[tuple[int, SymbolicTensor], ...]

    def set_pointer(self, offset: int, address: int) -> None:
        ctypes.c_void_p.from_buffer(self.params, offset).value = address


class Recorder:
    """Collects the calls of one pass.

    Attributes:
        inputs: name -> tensor that a run gets from outside.
        counts: (index of a call, a size, the i32[1] tensor in which the call leaves it for later calls).
        constants: tensors that calls hold addresses of.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.tensors: list[SymbolicTensor] = []
        self.inputs: dict[str, SymbolicTensor] = {}
        self.constants: list[Tensor | DeviceTensor] = []
        self.counts: list[tuple[int, Size, SymbolicTensor]] = []

    def add_input(self, name: str, dtype: paddle.dtype, shape: Shape) -> SymbolicTensor:
        """Declare what a run is given under this name."""
        assert name not in self.inputs, name
        self.inputs[name] = self.add_tensor(dtype, shape)
        return self.inputs[name]

    def add_tensor(self, dtype: paddle.dtype, shape: Shape) -> SymbolicTensor:
        self.tensors.append(SymbolicTensor(self, len(self.tensors), dtype, shape))
        return self.tensors[-1]

    def set_size(self, size: Size, tensor: SymbolicTensor) -> None:
        """From here on, a size is what the last call left in an i32[1] tensor: no more than before. 0 ends a run.

        Raises RecordingError: the size is another one and a constant; that is not done.
        """
        if size.extra:
            raise RecordingError(f"size {size}: expected one without a constant, got {size.extra}")
        self.counts.append((len(self.calls) - 1, size, tensor))

    def add_call(self, op: str, params: CParams, fields: Mapping[str, Any]) -> None:
        """Append the call `fdsd_<op>`.

        Fields of its params are numbers, Sizes, which a run fills in, or tensors, whose addresses they will hold.
        """
        sizes, pointers = [], []
        for name, value in fields.items():
            offset = getattr(type(params), name).offset
            if isinstance(value, Size):
                sizes.append((offset, value))
            elif isinstance(value, SymbolicTensor):
                pointers.append((offset, value))
            elif isinstance(value, Tensor | DeviceTensor):
                self.constants.append(value)
                setattr(params, name, value.data_ptr())
            else:
                setattr(params, name, value)
        self.calls.append(RecordedCall(op, params, tuple(sizes), tuple(pointers)))


def recorder_of(args: Iterable[Any]) -> Recorder | None:
    """Return what records a call with these arguments, None when none of them is symbolic."""
    for arg in args:
        if isinstance(arg, SymbolicTensor):
            return arg.recorder
    return None
