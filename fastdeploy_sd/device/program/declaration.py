"""What an op takes and returns, declared once: names, element types, sizes, attributes, and what is per row.

From a declaration follow the checks of arguments and their messages, the fields of the params struct, and everything in
op.py and operator_source.py. The struct itself, in custom_ops/include/fdsd, stays the contract: a declaration that does
not fit it is an error. Knows no single op and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastdeploy_sd.device.layout import Layout
from fastdeploy_sd.device.program.expression import GOT, Expression, parse
from fastdeploy_sd.errors import ConfigError

# Element types; NumPy has no bfloat16, its arrays of bit patterns are uint16.
F32, BF16, F16, I8, U8, I32, I64, U64 = (
    "float32", "bfloat16", "float16", "int8", "uint8", "int32", "int64", "uint64",
)  # fmt: skip
ACTIVATIONS = (F32, BF16, F16)  # float16 on GPUs only
# Element type -> DType, KvDType of custom_ops/include/fdsd. NumPy has no float8 either: a KV cache of bytes is one.
DTYPE_CODES = {F32: 0, BF16: 1, I8: 2, U8: 3, F16: 4}
ELEMENT_BYTES = {F32: 4, BF16: 2, F16: 2, I8: 1, U8: 1, I32: 4, I64: 8, U64: 8}
ANY = tuple(ELEMENT_BYTES)
_INTEGERS, _FLOATS = ("int32", "int64"), ("float32", "float64")
_POINTEES = {U8: ("uint8", "void"), BF16: ("void",), F16: ("void",)}  # of others: the type itself


@dataclass(frozen=True, slots=True)
class In:
    """An array that is read.

    Attributes:
        dtype: its element type, several to choose from, ANY, or the name of another argument or an attribute that has
            it.
        sizes: an expression per dimension, with commas between. Names are sizes; those that are fields of the params
            struct are written there. The first argument with an unknown size tells it.
        optional: may be None, the null pointer.
    """

    dtype: str | tuple[str, ...]
    sizes: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class InOut(In):
    """An array that is changed in place."""


@dataclass(frozen=True, slots=True)
class Out(In):
    """An array that is written."""


@dataclass(frozen=True, slots=True)
class Attr:
    """A number besides the arrays, or one of some element types."""

    type: type[int] | type[float] | type[bool] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A field that no caller gives: an expression."""

    text: str


@dataclass(frozen=True, slots=True)
class DTypeOf:
    """A field that no caller gives: the code of an argument's element type."""

    argument: str


Part = In | Attr | Value | DTypeOf
P = TypeVar("P", bound=Part)


def each(part: P, *names: str) -> dict[str, P]:
    """Return one declaration under several names."""
    return dict.fromkeys(names, part)


@dataclass(frozen=True, slots=True)
class Step:
    """One dimension of an argument, when arguments are read in their order.

    It tells a size that is `unknown`, None = all are known; `inverse` is that size from GOT, the dimension.
    """

    size: Expression
    unknown: str | None
    inverse: Expression | None


@dataclass(slots=True)
class Reading:
    """What the arguments of one call say: sizes and attributes, `itemsize(x)` included, and element types of arrays."""

    known: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


# An array -> its element type and shape.
Look = Callable[[str, Any], tuple[str, tuple[Any, ...]]]


class Declaration:
    """An op's declaration; raises ValueError: a size cannot be computed or solved for.

    Attributes:
        name: of the C function without fdsd_; its struct is the same in CamelCase + Params.
        per_row: the size that counts rows which do not depend on one another; None = there is none.
        steps: array -> its dimensions.
    """

    def __init__(self, name: str, per_row: str | None, parts: Mapping[str, Part]) -> None:
        self.name, self.per_row = name, per_row
        self.struct = "".join(word.capitalize() for word in name.split("_")) + "Params"
        self.arrays = {key: part for key, part in parts.items() if isinstance(part, In)}
        self.inputs = {key: part for key, part in self.arrays.items() if not isinstance(part, Out)}
        self.outputs = {key: part for key, part in self.arrays.items() if isinstance(part, Out)}
        self.attributes = {key: part for key, part in parts.items() if isinstance(part, Attr)}
        self.values = {key: parse(part.text)[0] for key, part in parts.items() if isinstance(part, Value)}
        self.dtype_codes = {key: part.argument for key, part in parts.items() if isinstance(part, DTypeOf)}
        self.steps = dict(self._ordered_steps())
        self.sizes = tuple(step.unknown for steps in self.steps.values() for step in steps if step.unknown is not None)

    def _ordered_steps(self) -> Iterator[tuple[str, tuple[Step, ...]]]:
        known = set(self.attributes)
        for name, array in (self.inputs | self.outputs).items():
            known.add(f"itemsize({name})")
            steps = []
            for size in parse(array.sizes):
                unknown = sorted(size.names - known)
                if len(unknown) > 1 or (unknown and array.optional):
                    raise ValueError(f"{self.name}: {name}: expected known sizes, got {', '.join(unknown)}")
                steps.append(Step(size, unknown[0], size.solved_for(unknown[0])) if unknown else Step(size, None, None))
                known.update(unknown)
            yield name, tuple(steps)

    def verify(self, layout: Layout) -> None:
        """Raise ConfigError, naming op and field, unless every field is declared as the library has it."""
        expected = self._field_types() | {size: _INTEGERS for size in self.sizes if size in layout.fields}
        for name in layout.fields.keys() | expected.keys():
            types = expected.get(name, ("none",))
            got = layout.fields[name].type if name in layout.fields else "none"
            # A struct in the struct may be shared with an op that writes what this one reads.
            is_shared = name in layout.fields and "." in layout.fields[name].path
            if got not in types and not (is_shared and f"const {got}" in types):
                raise ConfigError(
                    f"op {self.name}: field {name}: expected {' or '.join(types)}, the library has {got}; "
                    "run `scripts/dev build`"
                )

    def _field_types(self) -> dict[str, tuple[str, ...]]:
        types: dict[str, tuple[str, ...]] = {}
        for name, array in self.arrays.items():
            pointees = _POINTEES.get(array.dtype, (array.dtype,)) if array.dtype in ELEMENT_BYTES else ("void",)
            is_const = type(array) is In
            types[name] = tuple(f"{'const ' if is_const else ''}{pointee}*" for pointee in pointees)
        types |= {name: _FLOATS if attr.type is float else _INTEGERS for name, attr in self.attributes.items()}
        return types | dict.fromkeys([*self.values, *self.dtype_codes], _INTEGERS)

    def read(self, given: Mapping[str, Any], look: Look, names: Mapping[str, In]) -> Reading:
        """Look at the arguments of a call, of these names, in the order of their declaration; a missing one is None.

        Raises TypeError: an argument is unknown; ValueError: one is missing or not as declared.
        """
        declared: dict[str, Part] = {**self.arrays, **self.attributes}
        if given.keys() - declared.keys():
            unknown = ", ".join(given.keys() - declared.keys())
            raise TypeError(f"{self.name}: expected arguments {', '.join(declared)}, got {unknown}")
        reading = Reading()
        for name, attribute in self.attributes.items():
            self._read_attribute(name, attribute, given.get(name), reading)
        for name, array in names.items():
            value = given.get(name)
            if value is not None:
                self._read_array(name, array, look(name, value), reading)
            elif not array.optional:
                raise self.error(name, "an array", None)
        return reading

    def _read_attribute(self, name: str, attribute: Attr, value: Any, reading: Reading) -> None:
        if value is None:
            raise self.error(name, "a value", None)
        if isinstance(attribute.type, tuple):
            if value not in attribute.type:
                raise self.error(name, " or ".join(attribute.type), value)
            reading.dtypes[name], value = value, DTYPE_CODES[value]
        reading.known[name] = attribute.type(value) if attribute.type in (float, bool) else value

    def _read_array(self, name: str, array: In, got: tuple[str, tuple[Any, ...]], reading: Reading) -> None:
        dtype, shape = got
        allowed = self.dtypes_of(array, reading)
        if dtype not in allowed:
            raise self.error(name, " or ".join(allowed), dtype)
        known, steps = reading.known, self.steps[name]
        reading.dtypes[name], known[f"itemsize({name})"] = dtype, ELEMENT_BYTES[dtype]
        wanted = [step.size.value(known) if step.unknown is None else step.size.text for step in steps]
        is_right = len(shape) == len(steps)
        if is_right:
            for step, size in zip(steps, shape, strict=True):
                if step.inverse is not None and step.unknown is not None:
                    known[step.unknown] = step.inverse.value({**known, GOT: size})
                is_right &= _is_same(step.size.value(known), size)
        if not is_right:
            raise self.error(name, f"shape {_text(wanted)}", _text(shape))

    def dtypes_of(self, array: In, reading: Reading) -> tuple[str, ...]:
        """Return the element types that an array may have, given those before it."""
        if isinstance(array.dtype, tuple):
            return array.dtype
        return (array.dtype if array.dtype in ELEMENT_BYTES else reading.dtypes[array.dtype],)

    def output_shape(self, name: str, reading: Reading) -> tuple[Any, ...]:
        """Return the shape of an output. A negative size is none; the kernel will refuse it."""
        sizes = [step.size.value(reading.known) for step in self.steps[name]]
        return tuple(max(size, 0) if isinstance(size, int) else size for size in sizes)

    def numbers(self, reading: Reading) -> dict[str, Any]:
        """Return the fields that are no addresses."""
        numbers = {name: reading.known[name] for name in (*self.attributes, *self.sizes) if name in reading.known}
        numbers |= {name: value.value(reading.known) for name, value in self.values.items()}
        return numbers | {name: DTYPE_CODES[reading.dtypes[of]] for name, of in self.dtype_codes.items()}

    def error(self, name: str, expected: str, got: object) -> ValueError:
        return ValueError(f"{self.name}: {name}: expected {expected}, got {got}")


def _is_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; one that differs from run to run equals no number."""
    return isinstance(a, int) is isinstance(b, int) and bool(a == b)


def _text(shape: Any) -> str:
    return f"[{', '.join(map(str, shape))}]"
