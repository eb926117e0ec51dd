"""A recorded pass as one native call: memory for its tensors, and what differs from run to run.

The tensors of a pass live in an arena with room for so many rows. It grows when a run brings more: the recording is
laid out again, as are others that share the arena before they run. Does not know what the ops do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.arena import Arena, Lifetime, place
from fastdeploy_sd.ops.native.arrays import Array, address
from fastdeploy_sd.ops.native.program import NativeProgram, Patch
from fastdeploy_sd.ops.recorder import ELEMENT_BYTES, Dim, Recorder, RecordingError, Size, SymbolicTensor
from fastdeploy_sd.types import I64

_ARRAY_DTYPES: Mapping[paddle.dtype, np.dtype[Any]] = {
    paddle.float32: np.dtype(np.float32),
    paddle.bfloat16: np.dtype(np.uint16),  # bit patterns
    paddle.int32: np.dtype(np.int32),
    paddle.int64: np.dtype(np.int64),
}
_MIN_CAPACITY = 8

Counts = Mapping[str, int]
Inputs = Mapping[str, "Array | Tensor"]


class Program:
    """A recorded pass, ready to run.

    What it returns lies in its arena: the next run overwrites it, of this program or of another with the same arena.

    Args:
        recorder: holds the recording; nothing is recorded afterwards.
        outputs: the tensors a run returns.
        arena: shared by programs that do not run at the same time; None = one of its own.

    Raises:
        RecordingError: an output is an input, or of another recording.
        ConfigError: Paddle's slices are set to be copies.
        MemoryError, OSError: the system has no memory for the arena.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[SymbolicTensor], arena: Arena | None = None) -> None:
        for output in outputs:
            _check_output(recorder, output)
        self._recorder, self._outputs = recorder, tuple(outputs)
        self._arena = Arena() if arena is None else arena
        self._symbols = _Symbols(recorder)
        self._values: I64 = np.zeros(self._symbols.count, np.int64)
        dims = (dim for t in self._symbols.buffers for dim in t.shape)
        self._capacity = {dim.name: _MIN_CAPACITY for dim in dims if isinstance(dim, Size)}
        self._layout = self._laid_out(self._capacity)

    def run(self, inputs: Inputs, sizes: Counts | None = None) -> tuple[Tensor, ...]:
        """Run the pass.

        Args:
            inputs: an array or tensor for every declared input; their shapes say how large most sizes are. The same
                object as last time if only what is in the arrays differs.
            sizes: the sizes that are in no input's shape.

        Returns:
            The outputs.

        Raises:
            ValueError: an input is missing, unknown, of another dtype or shape, a size is unknown, or an op refused its
                arguments.
            MemoryError, OSError: the system has no memory for so large a run; smaller ones stay possible.
        """
        known = self._prepare(inputs, sizes)
        self._layout.native.run(self._values)
        return self._layout.results(known)

    def timed_run(self, inputs: Inputs, sizes: Counts | None = None) -> tuple[tuple[str, ...], I64]:
        """Run as `run` and return the name and the nanoseconds of every call."""
        self._prepare(inputs, sizes)
        return tuple(call.op for call in self._recorder.calls), self._layout.native.timed_run(self._values)

    def _prepare(self, inputs: Inputs, sizes: Counts | None) -> Counts:
        """Set the symbols and make room; returns the sizes."""
        known = self._symbols.read(inputs, sizes, self._values)
        grown = {name: known[name] for name, capacity in self._capacity.items() if known[name] > capacity}
        if grown or self._layout.generation != self._arena.generation:
            # Powers of two: few layouts, whatever the steps bring.
            capacity = self._capacity | {name: 1 << (need - 1).bit_length() for name, need in grown.items()}
            # Only a layout that has its memory makes room: the capacity must not be ahead of it.
            self._layout = self._laid_out(capacity)
            self._capacity = capacity
        return known

    def _laid_out(self, capacity: Counts) -> _Layout:
        return _Layout(self._recorder, self._symbols, capacity, self._outputs, self._arena)


class _Symbols:
    """What a run fills in: first every size that a call has in a field, then the address of every input.

    Most runs have the shapes of the run before: then only addresses are read; and nothing, if they have its inputs.

    Attributes:
        count: how many there are.
        buffers: the tensors that are no inputs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._inputs = recorder.inputs
        self._sizes = tuple(dict.fromkeys(size for call in recorder.calls for _, size in call.sizes))
        self._number_of_size = {size: i for i, size in enumerate(self._sizes)}
        self._number_of_input = {t.index: len(self._sizes) + i for i, t in enumerate(recorder.inputs.values())}
        self.count = len(self._sizes) + len(recorder.inputs)
        self.buffers = [t for t in recorder.tensors if t.index not in self._number_of_input]
        self._dtypes = [(name, (t.dtype, _ARRAY_DTYPES[t.dtype])) for name, t in recorder.inputs.items()]
        self._read: Inputs | None = None  # what `values` holds the addresses of
        self._last: tuple[list[Any], Counts | None] | None = None
        self._known: Counts = {}

    def of_size(self, size: Size) -> int:
        """The symbol of a size."""
        return self._number_of_size[size]

    def of_input(self, tensor: SymbolicTensor) -> int | None:
        """The symbol of an input's address; None when the tensor is no input."""
        return self._number_of_input.get(tensor.index)

    def read(self, inputs: Inputs, sizes: Counts | None, values: I64) -> Counts:
        """Write the symbols' values; returns the sizes, those that are given and those that the inputs' shapes tell.

        Args:
            values: i64[count], the same array in every call.
        """
        if inputs is self._read and self._last is not None and sizes == self._last[1]:
            return self._known
        self._read = None  # until everything was read
        if inputs.keys() != self._inputs.keys():
            raise ValueError(f"inputs: expected {', '.join(self._inputs)}, got {', '.join(inputs)}")
        shapes = [inputs[name].shape for name in self._inputs]
        if (shapes, sizes) != self._last:
            known = dict(sizes or ())
            for shape, (name, declared) in zip(shapes, self._inputs.items(), strict=True):
                _read_sizes(name, shape, declared, known)
            values[: len(self._sizes)] = [_size_value(size, known) for size in self._sizes]
            self._last, self._known = (shapes, sizes), known
        values[len(self._sizes) :] = [_address(name, inputs[name], *dtypes) for name, dtypes in self._dtypes]
        self._read = inputs
        return self._known


class _Layout:
    """The recording with a place for every tensor. Keeps no memory alive but that of its outputs.

    Attributes:
        native: the calls with the addresses of these places.
        generation: of the arena, in which they hold.
    """

    def __init__(
        self, recorder: Recorder, symbols: _Symbols, capacity: Counts, outputs: tuple[SymbolicTensor, ...], arena: Arena
    ) -> None:
        num_bytes = {t.index: _num_bytes(t, capacity) for t in symbols.buffers}
        uses: dict[int, list[int]] = {}
        for c, call in enumerate(recorder.calls):
            for _, tensor in call.pointers:
                uses.setdefault(tensor.index, []).append(c)
        for output in outputs:
            uses[output.index].append(len(recorder.calls))
        lifetimes = [Lifetime(num_bytes[t.index], uses[t.index][0], uses[t.index][-1]) for t in symbols.buffers]
        placement = place(lifetimes)
        arena.reserve(placement.num_bytes)
        self.generation, begin = arena.generation, int(arena.memory.data_ptr())
        address_of = {t.index: begin + offset for t, offset in zip(symbols.buffers, placement.offsets, strict=True)}
        patches = _fill_in(recorder, symbols, address_of)
        self.native = NativeProgram([(call.op, call.params) for call in recorder.calls], patches, symbols.count)
        self._wholes = [_view(arena.memory, address_of[output.index] - begin, output, capacity) for output in outputs]
        self._rows = [output.shape[0] for output in outputs]
        self._results: tuple[tuple[int, ...], tuple[Tensor, ...]] = (), ()

    def results(self, known: Counts) -> tuple[Tensor, ...]:
        """The outputs' rows of a run; the tensors of the run before where it had as many."""
        counts = tuple(_value(dim, known) for dim in self._rows)
        if counts != self._results[0]:
            self._results = counts, tuple(w[:n] for w, n in zip(self._wholes, counts, strict=True))
        return self._results[1]


def _fill_in(recorder: Recorder, symbols: _Symbols, addresses: Mapping[int, int]) -> list[Patch]:
    """Write the addresses of buffers into the calls' params; return the fields that a run fills."""
    patches = []
    for c, call in enumerate(recorder.calls):
        patches += [Patch(c, offset, 4, symbols.of_size(size)) for offset, size in call.sizes]
        for offset, tensor in call.pointers:
            symbol = symbols.of_input(tensor)
            if symbol is None:
                call.set_pointer(offset, addresses[tensor.index])
            else:
                patches.append(Patch(c, offset, 8, symbol))
    return patches


def _view(memory: Tensor, offset: int, tensor: SymbolicTensor, capacity: Counts) -> Tensor:
    """The tensor with room for all rows; raises ConfigError when its slices would not see what calls write."""
    if memory[:1].data_ptr() != memory.data_ptr():
        raise ConfigError("FLAGS_use_stride_kernel: expected 1, by which Paddle's slices share memory, got copies")
    size, shape = ELEMENT_BYTES[tensor.dtype], [_value(dim, capacity) for dim in tensor.shape]
    # First the type: Paddle moves a view that begins at an offset when it gets another.
    elements = memory.view(tensor.dtype)[offset // size :]
    whole = elements[: math.prod(shape)].reshape(shape)
    assert whole.data_ptr() == memory.data_ptr() + offset, "a view is not where the calls write"
    return whole


def _check_output(recorder: Recorder, output: SymbolicTensor) -> None:
    """Raise RecordingError unless a call of the recording may have written it."""
    if output.recorder is not recorder:
        raise RecordingError(f"output {list(output.shape)}: expected a tensor of the recording, got one of another")
    for name, tensor in recorder.inputs.items():
        if tensor is output:
            raise RecordingError(f"output {list(output.shape)}: expected what an op returned, got the input {name}")


def _num_bytes(tensor: SymbolicTensor, capacity: Counts) -> int:
    return math.prod(_value(dim, capacity) for dim in tensor.shape) * ELEMENT_BYTES[tensor.dtype]


def _value(dim: Dim, sizes: Counts) -> int:
    return sizes[dim.name] + dim.extra if isinstance(dim, Size) else dim


def _size_value(size: Size, known: Counts) -> int:
    if size.name not in known:
        raise ValueError(f"sizes: expected one for {size.name}, got {', '.join(known)}")
    return _value(size, known)


def _read_sizes(name: str, shape: Sequence[int], declared: SymbolicTensor, known: dict[str, int]) -> None:
    """Check an input's shape; sizes seen for the first time become known."""
    if len(shape) != len(declared.shape) or not all(
        _fits(dim, got, known) for dim, got in zip(declared.shape, shape, strict=True)
    ):
        sizes = ", ".join(f"{size} = {value}" for size, value in known.items())
        raise ValueError(f"{name}: expected shape {list(declared.shape)} with {sizes or 'any size'}, got {list(shape)}")


def _fits(dim: Dim, got: int, known: dict[str, int]) -> bool:
    """Whether a dimension can be `got`; a size seen for the first time becomes known."""
    if not isinstance(dim, Size):
        return dim == got
    return got >= dim.extra and known.setdefault(dim.name, got - dim.extra) == got - dim.extra


def _address(name: str, given: Any, dtype: paddle.dtype, array_dtype: np.dtype[Any]) -> int:
    """Return where an input is, an array or a tensor; raises ValueError when its memory is not as declared."""
    if isinstance(given, np.ndarray):
        if given.dtype == array_dtype and given.flags.c_contiguous:
            return address(given)
    elif given.dtype == dtype and given.is_contiguous() and given.place.is_cpu_place():
        return int(given.data_ptr())
    raise ValueError(f"{name}: expected contiguous {dtype}, got {given.dtype} with strides {given.strides}")
