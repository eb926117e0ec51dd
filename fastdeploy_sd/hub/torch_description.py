"""Follows the description of tensors in a file of PyTorch: a program of the pickle machine.

`pickletools` takes it apart and runs nothing. The few instructions that build dictionaries of tensors are followed here
on values that cannot do anything. Any other instruction, class or function is refused by name.

Source: PyTorch's torch/_utils.py (calls that make tensors), Python's pickletools (instructions).
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.errors import shown
from fastdeploy_sd.process.safetensors_writer import ITEM_BYTES

# Storage class -> name of the type in safetensors.
DTYPES: Mapping[str, str] = {
    "torch.DoubleStorage": "F64", "torch.FloatStorage": "F32", "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16", "torch.LongStorage": "I64", "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
}  # fmt: skip
_MAX_RANK = 8
_MARK = object()


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of a file: where its elements are.

    Attributes:
        dtype: as safetensors names it.
        key: of the storage. offset, strides: in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    key: str
    offset: int
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_storage_bytes(self) -> int:
        """Bytes that the storage must have. Elements that are repeated count, so that no file makes a larger one."""
        reach = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        end = (self.offset + reach + 1) * ITEM_BYTES[self.dtype] if all(self.shape) else 0
        return max(end, self.num_bytes)


class RefusedError(Exception):
    """The description asks for something that no dictionary of tensors needs."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the description names."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str


def read_description(program: bytes) -> object:
    """Return dictionaries, lists, tuples, texts and numbers with TorchTensor in them; raises RefusedError."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(program):
            machine.step(opcode.name, argument)
        return machine.result()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RefusedError(f"expected a description of tensors: {error}") from None


class _Machine:
    """The stack and the memo of the pickle machine."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Follow one instruction."""
        if name not in _STEPS:
            named = [f" of {value.name}" for value in self._stack[-2:] if isinstance(value, _Name)]
            raise RefusedError(f"expected instructions that describe tensors, got {name}{''.join(named)}")
        _STEPS[name](self, argument)

    def result(self) -> object:
        """Return the only value that is left."""
        [value] = self._stack
        return value

    def push(self, value: object) -> None:
        self._stack.append(value)

    def remember(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def recall(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def name(self) -> None:
        function, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Name(f"{module}.{function}"))

    def storage(self) -> None:
        self._stack.append(_storage(self._stack.pop()))

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(_called(function, arguments))

    def set_attributes(self) -> None:
        """Leave out attributes of a dictionary, such as the versions of modules."""
        self._stack.pop()
        self._top(dict)

    def add_items(self, values: list[Any]) -> None:
        self._top(dict).update(zip(values[::2], values[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def take(self, count: int) -> list[Any]:
        """Take the last values of the stack."""
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return values

    def take_marked(self) -> list[Any]:
        """Take what was put on the stack since the last mark, and the mark."""
        num_values = self._stack[::-1].index(_MARK)
        values = self.take(num_values)
        self._stack.pop()
        return values

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise RefusedError(f"expected a {kind.__name__} to be changed, got {described(self._stack[-1])}")
        return self._stack[-1]


_Step = Callable[[_Machine, Any], None]
_STEPS: Mapping[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, value: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        _Machine.push,
    ),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.push(_MARK),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.take_marked())),
    "APPEND": lambda machine, _: machine.append(machine.take(1)),
    "APPENDS": lambda machine, _: machine.append(machine.take_marked()),
    "SETITEM": lambda machine, _: machine.add_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.add_items(machine.take_marked()),
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": _Machine.remember,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "GLOBAL": lambda machine, name: machine.push(_Name(name.replace(" ", "."))),
    "STACK_GLOBAL": lambda machine, _: machine.name(),
    "BINPERSID": lambda machine, _: machine.storage(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.set_attributes(),
}


def _storage(persistent_id: object) -> _Storage:
    match persistent_id:
        case ("storage", _Name(name), str(key), *_) if name in DTYPES:
            return _Storage(DTYPES[name], key)
    raise RefusedError(f"expected storages of {', '.join(DTYPES)}, got {described(persistent_id)}")


def _called(function: object, arguments: object) -> object:
    """Return what an allowed function makes of its arguments."""
    match function, arguments:
        case _Name("torch._utils._rebuild_tensor_v2"), (
            _Storage() as storage, int(offset), tuple(shape), tuple(strides), *_
        ):  # fmt: skip
            return _tensor(storage, offset, shape, strides)
        case _Name("torch._utils._rebuild_parameter"), (TorchTensor() as tensor, *_):
            return tensor
        case _Name("torch.Size"), (tuple(shape),):
            return shape
        case _Name("collections.OrderedDict"), ():
            return {}
    raise RefusedError(f"expected a description of tensors, got a call of {described(function)}")


def _tensor(storage: _Storage, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> TorchTensor:
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > _MAX_RANK or not all(type(n) is int and n >= 0 for n in numbers):
        raise RefusedError(f"expected a shape and strides of a tensor, got {described((shape, strides))}")
    return TorchTensor(storage.dtype, shape, storage.key, offset, strides)


def described(value: object) -> str:
    """Return a value for an error text."""
    return value.name if isinstance(value, _Name) else shown(value)
