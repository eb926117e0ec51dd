"""A declared op on NumPy arrays: called once, or bound to arrays that stay. Knows no framework and no single op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.layout import layout, struct_type
from fastdeploy_sd.device.library import BoundCall, CParams
from fastdeploy_sd.device.program.declaration import BF16, Declaration, Look, Part, Reading


class HostOp:
    """An op on NumPy arrays: `fdsd_<name>`; per_row as in Declaration.

    Args:
        parts: every argument, attribute and computed field, in order: inputs, then outputs. A name is that of the
            params struct's field; see `Layout.fields`.
    """

    def __init__(self, name: str, per_row: str | None = None, /, **parts: Part) -> None:
        self.declaration = Declaration(name, per_row, parts)

    def __repr__(self) -> str:
        return f"<op {self.declaration.name}>"

    @functools.cached_property
    def params_type(self) -> type[CParams]:
        """The params struct. Raises ConfigError: the declaration is not the library's."""
        self.declaration.verify(layout(self.declaration.struct))
        return struct_type(self.declaration.struct)

    def arguments_in(self, holder: object) -> dict[str, Any]:
        """Return the inputs and attributes that an object has under their own names."""
        names = (*self.declaration.inputs, *self.declaration.attributes)
        return {name: getattr(holder, name) for name in names if hasattr(holder, name)}

    def bind(self, **arguments: Any) -> BoundCall:
        """Return a call of this op on these arrays: every input, output and attribute.

        Its params hold the arrays' addresses and the counts that their shapes tell. A caller that runs it on fewer rows
        writes the counts, which are fields of `params` with the names of the sizes.

        Raises TypeError: an argument is unknown; ValueError: an argument is missing or not as declared.
        """
        arrays = [arguments.get(name) for name in self.declaration.arrays]
        return BoundCall(self.declaration.name, self.params_of(arguments, self._look, _address), arrays=arrays)

    def params_of(self, arguments: Mapping[str, Any], look: Look, address: Callable[[Any], int]) -> CParams:
        """Return the params of a call on whole arrays, wherever they are; arguments as `bind`'s.

        Raises TypeError: an argument is unknown; ValueError: an argument is missing or not as declared.
        """
        declared = self.declaration
        return self._params(declared.read(arguments, look, declared.arrays), arguments, address)

    def __call__(self, **arguments: Any) -> Any:
        """Run the op on inputs and attributes, and return the output, or a tuple of them, in new arrays.

        Raises as `bind`, and ValueError where the kernel refused an argument; the text says what was expected and got.
        """
        reading = self.declaration.read(arguments, self._look, self.declaration.inputs)
        outputs = {
            name: np.empty(self.declaration.output_shape(name, reading), array_dtype(dtype))
            for name, dtype in self._output_dtypes(reading)
        }
        whole = {**arguments, **outputs}
        arrays = [whole.get(name) for name in self.declaration.arrays]
        BoundCall(self.declaration.name, self._params(reading, whole, _address), arrays=arrays).run()
        return unpacked(tuple(outputs.values()))

    def _output_dtypes(self, reading: Reading) -> list[tuple[str, str]]:
        outputs = self.declaration.outputs
        return [(name, self.declaration.dtypes_of(output, reading)[0]) for name, output in outputs.items()]

    def _params(self, reading: Reading, arguments: Mapping[str, Any], address: Callable[[Any], int]) -> CParams:
        params = self.params_type()
        for name in self.declaration.arrays:
            array = arguments.get(name)
            setattr(params, name, None if array is None else address(array))
        for name, number in self._numbers(reading).items():
            setattr(params, name, number)
        return params

    def _numbers(self, reading: Reading) -> dict[str, Any]:
        fields = layout(self.declaration.struct).fields
        return {name: number for name, number in self.declaration.numbers(reading).items() if name in fields}

    def _look(self, name: str, array: Any) -> tuple[str, tuple[int, ...]]:
        if not isinstance(array, np.ndarray):
            raise self.declaration.error(name, "an array", type(array).__name__)
        if not array.flags.c_contiguous:
            raise self.declaration.error(name, "a contiguous array", f"strides {list(array.strides)}")
        return array_dtype_name(array.dtype), array.shape


def array_dtype_name(dtype: npt.DTypeLike) -> str:
    """Return the name that declarations have for a NumPy dtype: its own, where uint16 is bfloat16."""
    name = np.dtype(dtype).name
    return BF16 if name == "uint16" else name


def _address(array: Any) -> int:
    return int(array.ctypes.data)


def array_dtype(name: str) -> np.dtype[np.generic]:
    """Return NumPy's type of elements by their name in declarations; bfloat16 is uint16."""
    return np.dtype("uint16" if name == BF16 else name)


def unpacked(outputs: tuple[Any, ...]) -> Any:
    """Return an only output itself."""
    return outputs[0] if len(outputs) == 1 else outputs
