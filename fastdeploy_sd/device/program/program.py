"""A recorded pass as one native call, over memory that is laid out once.

A Recording knows how large every tensor of its pass can be, so it places them in an arena of constant size. A Program
is a recording over an arena and over inputs that stay where they are: a run is given the sizes and nothing else. Two
programs over one recording, each with its own arena and inputs, make it possible to prepare one run while another one
runs; programs that never run at the same time share an arena. Does not know what the ops do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.arrays import Array, address
from fastdeploy_sd.device.device_tensor import DeviceTensor, dtype_name
from fastdeploy_sd.device.program.declaration import ELEMENT_BYTES
from fastdeploy_sd.device.program.host_op import array_dtype
from fastdeploy_sd.device.program.native_program import Count, NativeProgram, Patch
from fastdeploy_sd.device.program.recorder import Recorder, RecordingError, Size, SymbolicTensor
from fastdeploy_sd.device.tensors import aligned_zeros, from_numpy
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import I64

ALIGNMENT = 64
Counts = Mapping[str, int]
Inputs = Mapping[str, "Array | Tensor | DeviceTensor"]
# How the rows of an input after a run's own are filled: with a number, or with the last element.
Padding = Mapping[str, int | Literal["last"]]


class Recording:
    """A recorded pass, and where its tensors lie in an arena.

    Args:
        outputs: the tensors that are still wanted when a run is over.
        bounds: how large each named size can be.
        padding: how to fill inputs that a device wants to be longer than a run's sizes say, so that fewer sizes come
            up; None = sizes must stay as they are. Of every input whose first dimension is a size.

    Raises RecordingError: an output is an input, or of another recording; ValueError: a size has no bound, or padding
    does not name the inputs that it must.
    """

    def __init__(
        self, recorder: Recorder, outputs: Sequence[SymbolicTensor], bounds: Counts, padding: Padding | None = None
    ) -> None:
        for output in outputs:
            _verify_output(recorder, output)
        self.recorder, self.outputs, self.bounds, self.padding = recorder, tuple(outputs), dict(bounds), padding
        sized = {name for name, tensor in recorder.inputs.items() if isinstance(tensor.shape[0], Size)}
        if padding is not None and padding.keys() != sized:
            raise ValueError(f"padding: expected {', '.join(sorted(sized))}, got {', '.join(sorted(padding))}")
        sizes = dict.fromkeys(size for call in recorder.calls for _, size in call.sizes)
        dims = (dim for tensor in recorder.tensors for dim in tensor.shape)
        for size in (*sizes, *(dim for dim in dims if isinstance(dim, Size))):
            if size.name not in bounds:
                raise ValueError(f"bounds: expected one for {size.name}, got {', '.join(bounds)}")
        self.symbols = tuple(sizes)
        inputs = {tensor.index for tensor in recorder.inputs.values()}
        buffers = [tensor for tensor in recorder.tensors if tensor.index not in inputs]
        uses: dict[int, list[int]] = {}
        for c, call in enumerate(recorder.calls):
            for _, tensor in call.pointers:
                uses.setdefault(tensor.index, []).append(c)
        for output in outputs:
            uses[output.index].append(len(recorder.calls))
        lives = [Lifetime(self.num_bytes_of(t), uses[t.index][0], uses[t.index][-1]) for t in buffers]
        offsets, self.num_bytes = place(lives)
        self.offsets = {t.index: offset for t, offset in zip(buffers, offsets, strict=True)}

    def shape_of(self, tensor: SymbolicTensor) -> list[int]:
        return [self.bounds[dim.name] + dim.extra if isinstance(dim, Size) else dim for dim in tensor.shape]

    def num_bytes_of(self, tensor: SymbolicTensor) -> int:
        return math.prod(self.shape_of(tensor)) * ELEMENT_BYTES[dtype_name(tensor.dtype)]


class Program:
    """A recording that can be run: see the module. This one runs on the host; CudaProgram overrides the rest.

    Args:
        inputs: an array or tensor for every declared input, as large as it can be. They are read where they are.
        arena: u8[recording.num_bytes] or more; None = one of its own.

    Attributes:
        outputs: the recording's, as large as they can be: a run writes the first rows of each.

    Raises ValueError: an input or a constant is missing, unknown, or not as declared; ConfigError: no memory for it, or
    Paddle's slices are set to be copies.
    """

    _place = "the host"

    def __init__(self, recording: Recording, inputs: Inputs, arena: Any = None) -> None:
        self._recording, self._inputs = recording, inputs
        self._arena: Any = allocate_arena(recording.num_bytes) if arena is None else arena
        declared = recording.recorder.inputs
        for constant in recording.recorder.constants:
            if isinstance(constant, DeviceTensor) is (self._place == "the host"):
                raise ValueError(f"constants: expected tensors of {self._place}, got {_described(constant)}")
        if inputs.keys() != declared.keys():
            raise ValueError(f"inputs: expected {', '.join(declared)}, got {', '.join(inputs)}")
        begin = int(self._arena.data_ptr())
        addresses = {index: begin + offset for index, offset in recording.offsets.items()}
        for name, tensor in declared.items():
            addresses[tensor.index] = self._address(name, inputs[name], tensor.dtype, recording.shape_of(tensor))
        self._build(addresses)
        self.outputs: tuple[Any, ...] = tuple(
            self._view(recording.offsets[output.index], output.dtype, recording.shape_of(output))
            for output in recording.outputs
        )

    def run(self, sizes: Counts) -> None:
        """Run the pass at every named size; a device with memory of its own has only started it when this returns.

        Raises ValueError: a size is unknown or beyond its bound, or an op refused its arguments.
        """
        self._set(sizes)
        self._native.run()

    def timed_run(self, sizes: Counts) -> tuple[tuple[str, ...], I64]:
        """Run to the end and return the name and the nanoseconds of every call."""
        self._set(sizes)
        return tuple(call.op for call in self._recording.recorder.calls), self._native.timed_run()

    def _set(self, sizes: Counts) -> None:
        verify_sizes(sizes, self._recording.bounds)
        for i, size in enumerate(self._recording.symbols):
            self._native.symbols[i] = sizes[size.name] + size.extra

    def _build(self, addresses: Mapping[int, int]) -> None:
        """Make the native program of the recording's calls, over tensors at these addresses by index."""
        recorder, symbols = self._recording.recorder, self._recording.symbols
        patches = bind_calls(self._recording, addresses, symbols)
        counts = [Count(c, symbols.index(size), addresses[tensor.index]) for c, size, tensor in recorder.counts]
        self._native = NativeProgram([(call.op, call.params) for call in recorder.calls], patches, len(symbols), counts)

    def _address(self, name: str, given: Any, dtype: paddle.dtype, shape: Sequence[int]) -> int:
        """Return where an input is; raises ValueError when it is not as declared."""
        if list(given.shape) != list(shape):
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(given.shape)}")
        if isinstance(given, np.ndarray):
            if given.dtype == array_dtype(dtype_name(dtype)) and given.flags.c_contiguous:
                return address(given)
        elif isinstance(given, DeviceTensor):
            raise ValueError(f"{name}: expected memory of the host, got {given}")
        elif given.dtype == dtype and given.is_contiguous() and given.place.is_cpu_place():
            return int(given.data_ptr())
        raise ValueError(f"{name}: expected contiguous {dtype}, got {given.dtype} with strides {given.strides}")

    def _view(self, offset: int, dtype: paddle.dtype, shape: Sequence[int]) -> Any:
        """A tensor in the arena; raises ConfigError when its slices would not see what calls write."""
        arena = self._arena
        if arena[:1].data_ptr() != arena.data_ptr():
            raise ConfigError("FLAGS_use_stride_kernel: expected 1, by which Paddle's slices share memory, got copies")
        # First the type: Paddle moves a view that begins at an offset when it gets another.
        elements = arena.view(dtype)[offset // ELEMENT_BYTES[dtype_name(dtype)] :]
        whole = elements[: math.prod(shape)].reshape(shape)
        is_there = math.prod(shape) == 0 or whole.data_ptr() == arena.data_ptr() + offset
        assert is_there, "a view is not where the calls write"
        return whole


def bind_calls(
    recording: Recording, addresses: Mapping[int, int], symbols: Sequence[Size], first: int = 0
) -> list[Patch]:
    """Write the addresses into the params of all calls, and return the patches for their sizes.

    `symbols` are in the order of the program's symbols; `first` is the number of the recording's first call in it.
    """
    patches = []
    for c, call in enumerate(recording.recorder.calls, first):
        patches += [Patch(c, offset, 4, symbols.index(size)) for offset, size in call.sizes]
        for offset, tensor in call.pointers:
            call.set_pointer(offset, addresses[tensor.index])
    return patches


def verify_sizes(sizes: Counts, bounds: Counts) -> None:
    """Raise ValueError unless every size is there and within its bound."""
    for name, bound in bounds.items():
        if not 0 <= sizes.get(name, -1) <= bound:
            raise ValueError(f"sizes: expected {name} in 0..{bound}, got {sizes.get(name)}")


def _verify_output(recorder: Recorder, output: Tensor | SymbolicTensor) -> None:
    """Raise RecordingError unless a call of the recording may have written it."""
    if not isinstance(output, SymbolicTensor) or output.recorder is not recorder:
        raise RecordingError(f"output {list(output.shape)}: expected a tensor of the recording, got one of another")
    for name, tensor in recorder.inputs.items():
        if tensor is output:
            raise RecordingError(f"output {list(output.shape)}: expected what an op returned, got the input {name}")


def _described(constant: Tensor | DeviceTensor) -> str:
    return str(constant) if isinstance(constant, DeviceTensor) else f"{constant.dtype}{constant.shape}"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer's size, and the calls between which its memory is its own, both included."""

    num_bytes: int
    first: int
    last: int


def allocate_arena(num_bytes: int) -> Tensor:
    """Return zeros u8[num_bytes]; the system provides a page when it is first touched.

    One tensor, of which all others are views: Paddle frees what lies at an address once. Raises ConfigError: the system
    does not give that much.
    """
    try:
        return from_numpy(aligned_zeros((max(num_bytes, ALIGNMENT),), np.uint8))
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"max_num_batched_tokens, max_num_seqs: expected steps that the system has memory for, got {num_bytes}"
            f" bytes ({error})"
        ) from None


def place(buffers: Sequence[Lifetime]) -> tuple[tuple[int, ...], int]:
    """Give every buffer an offset, a multiple of 64, so that those alive at the same call do not overlap.

    The largest come first; each gets the lowest gap that is wide enough among those placed before whose lives meet its
    own. Returns the offsets and the bytes of the whole arena.

    Source: arXiv:2001.03288, greedy by size.
    """
    offsets = [0] * len(buffers)
    placed: list[int] = []
    end_of_all = 0
    for i in sorted(range(len(buffers)), key=lambda i: -buffers[i].num_bytes):
        size = -(-buffers[i].num_bytes // ALIGNMENT) * ALIGNMENT
        met = sorted((offsets[j], j) for j in placed if _meet(buffers[i], buffers[j]))
        offset = 0
        for begin, j in met:
            if offset + size <= begin:
                break
            offset = max(offset, begin + -(-buffers[j].num_bytes // ALIGNMENT) * ALIGNMENT)
        offsets[i] = offset
        placed.append(i)
        end_of_all = max(end_of_all, offset + size)
    return tuple(offsets), end_of_all


def _meet(a: Lifetime, b: Lifetime) -> bool:
    return a.first <= b.last and b.first <= a.last
