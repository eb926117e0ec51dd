"""Records op calls instead of running them: what stands for tensors meanwhile, and what is known of each call.

A pass over a model is recorded by running its Python once on symbolic tensors. They have a dtype and a shape whose
first dimension is a named size, and no content: whatever looks at content, or decides by a size, is an error, so a pass
that can be recorded does the same for every step. Knows no single op (ops/lowering.py) and no memory (ops/program.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import paddle
from paddle import Tensor

from fastdeploy_sd.errors import suggest
from fastdeploy_sd.ops.library import CParams

DTYPE_CODES = {paddle.float32: 0, paddle.bfloat16: 1}
ELEMENT_BYTES = {paddle.float32: 4, paddle.bfloat16: 2, paddle.int32: 4, paddle.int64: 8}


class RecordingError(TypeError):
    """The pass does something that cannot be recorded; the text names it."""


class Size:
    """A dimension that every run has its own value for: a named count, plus a constant."""

    __slots__ = ("extra", "name")

    def __init__(self, name: str, extra: int = 0) -> None:
        self.name, self.extra = name, extra

    def __add__(self, extra: int) -> Size:
        return Size(self.name, self.extra + extra)

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
    """Stands for a tensor in a pass that is recorded.

    Attributes:
        recorder: what records the pass.
        index: its number among the recorder's tensors.
        dtype: a Paddle dtype.
        shape: the first dimension is a Size, the others are Sizes or integers.
    """

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
    """One op call.

    Attributes:
        op: its name in the kernel library.
        params: its params struct, complete but for the fields below.
        sizes: (offset in params, size) of every 4-byte field that is a size.
        pointers: (offset in params, tensor) of every address of a symbolic tensor.
    """

    op: str
    params: CParams
    sizes: tuple[tuple[int, Size], ...]
    pointers: tuple[tuple[int, SymbolicTensor], ...]

    def set_pointer(self, offset: int, address: int) -> None:
        """Write an address into the params."""
        ctypes.c_void_p.from_buffer(self.params, offset).value = address


Field = int | float | Size | SymbolicTensor | ctypes.Structure | ctypes.c_void_p


class CallBuilder:
    """What the lowering of one call works with: checks of its arguments as the Paddle binding makes them, and outputs.

    Attributes:
        op: the op as it was called, for errors.
    """

    def __init__(self, recorder: Recorder, op: str) -> None:
        self._recorder, self.op = recorder, op

    def matrix(self, name: str, tensor: Any) -> tuple[Dim, int]:
        """Return rows and columns; raises ValueError when the tensor is no matrix."""
        shape = self._shape(name, tensor)
        if len(shape) != 2 or isinstance(shape[1], Size):  # noqa: PLR2004
            raise self.error(name, "a matrix", list(shape))
        return shape[0], shape[1]

    def data(self, name: str, tensor: Any, dtype: paddle.dtype, shape: Sequence[Dim]) -> Field:
        """Return the address of a tensor of exactly this dtype and shape.

        Raises:
            ValueError: it has another dtype or shape, or is not contiguous in the memory of the CPU.
        """
        got = self._shape(name, tensor)
        if len(got) != len(shape) or not all(map(_is_same, got, shape)):
            raise self.error(name, f"shape {list(shape)}", list(got))
        if tensor.dtype != dtype:
            raise self.error(name, str(dtype), tensor.dtype)
        if isinstance(tensor, SymbolicTensor):
            return tensor
        if not tensor.place.is_cpu_place() or not tensor.is_contiguous():
            raise self.error(name, "a contiguous CPU tensor", tensor.place)
        self._recorder.constants.append(tensor)
        return ctypes.c_void_p(tensor.data_ptr())

    def optional(self, name: str, tensor: Any, dtype: paddle.dtype, shape: Sequence[Dim]) -> Field:
        """As `data`; None is the null pointer."""
        return ctypes.c_void_p(None) if tensor is None else self.data(name, tensor, dtype, shape)

    def dtype_code(self, name: str, dtype: paddle.dtype) -> int:
        """Return the DType code of activations; raises ValueError for others than float32 and bfloat16."""
        if dtype not in DTYPE_CODES:
            raise self.error(name, "float32 or bfloat16", dtype)
        return DTYPE_CODES[dtype]

    def output(self, dtype: paddle.dtype, shape: Shape) -> SymbolicTensor:
        """Return a new tensor that the call writes."""
        return self._recorder.add_tensor(dtype, shape)

    def emit(self, op: str, params: type[CParams], **fields: Field) -> None:
        """Append the call `fdsd_<op>` with these fields of its params struct, all of them."""
        constants: dict[str, Any] = {}
        sizes, pointers = [], []
        for name, value in fields.items():
            offset = getattr(params, name).offset
            if isinstance(value, Size):
                sizes.append((offset, value))
            elif isinstance(value, SymbolicTensor):
                pointers.append((offset, value))
            else:
                constants[name] = value
        declared = {name for name, *_ in params._fields_}
        assert fields.keys() == declared, f"{self.op}: fields {sorted(fields.keys() ^ declared)}"
        self._recorder.calls.append(RecordedCall(op, params(**constants), tuple(sizes), tuple(pointers)))

    def error(self, name: str, expected: str, got: object) -> ValueError:
        """Return the error about one argument."""
        return ValueError(f"{self.op}: {name}: expected {expected}, got {got}")

    def _shape(self, name: str, tensor: Any) -> Shape:
        if isinstance(tensor, SymbolicTensor):
            if tensor.recorder is not self._recorder:
                raise self.error(name, "a tensor of the pass that is recorded", "one of another")
            return tensor.shape
        if not isinstance(tensor, Tensor):
            raise self.error(name, "a tensor", type(tensor).__name__)
        return tuple(tensor.shape)


Outputs = tuple[SymbolicTensor, ...]
Lowering = Callable[..., Outputs]


class Recorder:
    """Collects the calls of one pass.

    Args:
        lowerings: op name -> what turns its arguments (after a CallBuilder) into a call, and returns its outputs.

    Attributes:
        calls: in order.
        tensors: every symbolic tensor, by index.
        inputs: name -> tensor that a run gets from outside.
        constants: tensors that calls hold addresses of.
    """

    def __init__(self, lowerings: Mapping[str, Lowering]) -> None:
        self._lowerings = lowerings
        self.calls: list[RecordedCall] = []
        self.tensors: list[SymbolicTensor] = []
        self.inputs: dict[str, SymbolicTensor] = {}
        self.constants: list[Tensor] = []

    def add_input(self, name: str, dtype: paddle.dtype, shape: Shape) -> SymbolicTensor:
        """Declare what a run is given under this name."""
        assert name not in self.inputs, name
        self.inputs[name] = self.add_tensor(dtype, shape)
        return self.inputs[name]

    def add_tensor(self, dtype: paddle.dtype, shape: Shape) -> SymbolicTensor:
        """Return a new symbolic tensor."""
        self.tensors.append(SymbolicTensor(self, len(self.tensors), dtype, shape))
        return self.tensors[-1]

    def run(self, name: str, args: Sequence[Any]) -> list[SymbolicTensor]:
        """Record a call as `shim.run` gets it; returns its outputs.

        Raises:
            RecordingError: the op cannot be recorded.
            ValueError: a shape or dtype disagrees, as when the op runs.
        """
        if name not in self._lowerings:
            known, nearest = ", ".join(self._lowerings), suggest(name, self._lowerings)
            raise RecordingError(f"op {name}: expected one of {known} while a pass is recorded{nearest}")
        return list(self._lowerings[name](CallBuilder(self, name), *args))


def recorder_of(args: Sequence[Any]) -> Recorder | None:
    """Return what records a call with these arguments, None when none of them is symbolic."""
    for arg in args:
        if isinstance(arg, SymbolicTensor):
            return arg.recorder
    return None


def _is_same(a: Dim, b: Dim) -> bool:
    return isinstance(a, Size) is isinstance(b, Size) and a == b
