"""The shape of an op case: one op, its two functions and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.program.op import Op
from tests.ops.backends import from_paddle, to_paddle

Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class OpCases:
    """Everything the harness needs to test one op on every backend.

    Attributes:
        function, reference: of the same keyword arguments, returning one array or a tuple. The function also takes
            Paddle tensors if `op` is an Op.
        inputs: case name -> keyword arguments. What is changed in place counts as further outputs.
        op: its declaration; None = not declared.
        on_host: arguments that stay NumPy arrays where others are tensors.
        take: arguments and rows, of `op.declaration.per_row` -> arguments of these rows alone, in this order. What is
            changed in place is the same object. None: the arguments that the declaration has per row.
        offsets: outputs that count others of their call, and so are not a row's own.
        rtol, atol: for float32 outputs; bfloat16 and float16 outputs may differ by bf16_ulps units in the last place.
        bf16_atol: in place of atol for bfloat16 outputs of an op that rounds on its way, an eighth of it for float16;
            None: atol.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Mapping[str, Kwargs]
    op: HostOp | None = None
    on_host: Collection[str] = ()
    take: Callable[[Kwargs, Sequence[int]], Kwargs] | None = None
    offsets: Collection[str] = ()
    rtol: float = 1e-5
    atol: float = 1e-6
    bf16_ulps: float = 1.0
    bf16_atol: float | None = None

    @property
    def is_operator(self) -> bool:
        """Whether the op runs on Paddle tensors."""
        return isinstance(self.op, Op)

    def run(self, kwargs: Kwargs) -> list[np.ndarray]:
        """Outputs of the function, then all arrays of its arguments as it left them."""
        return self._run(self.function, self.copied(kwargs))

    def run_reference(self, kwargs: Kwargs) -> list[np.ndarray]:
        """The same of the reference."""
        return self._run(self.reference, self.copied(kwargs))

    def run_operator(self, kwargs: Kwargs) -> list[np.ndarray]:
        """The same of Paddle's operator."""
        on_tensors = {name: mapped(v, np.copy if name in self.on_host else to_paddle) for name, v in kwargs.items()}
        return [from_paddle(tensor) for tensor in self._run(self.function, on_tensors)]

    def num_rows(self, kwargs: Kwargs) -> int:
        """How many rows the arguments have; 0 if the declaration does not say what is per row."""
        if self.op is None or self.op.declaration.per_row is None:
            return 0
        found = [len(array) for name in self._per_row() for array in arrays(kwargs.get(name))]
        return found[0] if found else len(next(arrays(kwargs["batch" if "batch" in kwargs else "states"]), ()))

    def run_rows(self, kwargs: Kwargs, rows: Sequence[int]) -> list[np.ndarray]:
        """Outputs of some rows, but for offsets; the arguments are changed in place."""
        assert self.op is not None
        part = self.take or self._taken
        outputs = dict(zip(self.op.declaration.outputs, arrays(self.function(**part(kwargs, rows))), strict=True))
        return [output for name, output in outputs.items() if name not in self.offsets]

    def _per_row(self) -> list[str]:
        assert self.op is not None
        declared = self.op.declaration
        return [name for name in declared.inputs if declared.steps[name][0].size.text == declared.per_row]

    def _taken(self, kwargs: Kwargs, rows: Sequence[int]) -> Kwargs:
        taken = {name: kwargs[name][list(rows)] for name in self._per_row() if kwargs.get(name) is not None}
        return {**kwargs, **taken}

    @staticmethod
    def copied(kwargs: Kwargs) -> dict[str, Any]:
        """The arguments with copies of all arrays."""
        return {name: mapped(value, np.copy) for name, value in kwargs.items()}

    @staticmethod
    def _run(function: Callable[..., Any], kwargs: Kwargs) -> list[Any]:
        return [*arrays(function(**kwargs)), *arrays(tuple(kwargs.values()))]


def mapped(value: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    """The value with every array in it converted."""
    if isinstance(value, np.ndarray):
        return convert(value)
    if isinstance(value, tuple):
        items = [mapped(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: mapped(getattr(value, field.name), convert) for field in fields(value)})
    return value


def arrays(value: Any) -> Iterator[Any]:
    """Every array or tensor in the value."""
    if isinstance(value, tuple):
        for item in value:
            yield from arrays(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from arrays(getattr(value, field.name))
    elif hasattr(value, "dtype") and not isinstance(value, type):
        yield value
