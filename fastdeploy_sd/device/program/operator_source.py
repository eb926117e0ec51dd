"""The Paddle operators of declared ops, as C++ source: each looks at its tensors as the declaration says, fills the
params struct and calls the kernel library. Knows declarations and Paddle's registration; knows no single op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fastdeploy_sd.device.layout import Layout
from fastdeploy_sd.device.program.declaration import ELEMENT_BYTES, Attr, Declaration, In, InOut

_HEAD = """// Made from the declarations of ops; see fastdeploy_sd/device/program/operator_source.py.
#include "paddle_binding.h"

using namespace fdsd_paddle;  // NOLINT: the file is all bindings
"""
_ATTRIBUTE_TYPES = {int: "int", float: "float", bool: "bool"}


def operator_source(ops: Iterable[Declaration], headers: Iterable[str], layout: Callable[[str], Layout]) -> str:
    """Return the source of one file with an operator `fdsd_<op>` for every op, over all headers of include/fdsd.

    Raises ConfigError: a declaration is not the library's.
    """
    includes = [f'#include "fdsd/{header}"' for header in headers]
    operators = [_operator(op, layout(op.struct)) for op in ops]
    return "\n".join([*includes, _HEAD, *operators])


def _operator(op: Declaration, layout: Layout) -> str:
    op.verify(layout)
    body = [f'constexpr const char* kOp = "{op.name}";', f"fdsd::{op.struct} p{{}};"]
    for name in op.inputs:
        body += _read(op, name)
    for name, output in op.outputs.items():
        sizes = ", ".join(step.size.cpp() for step in op.steps[name])
        assert isinstance(output.dtype, str)
        body.append(f"Tensor {name} = Empty({{{sizes}}}, {_dtype_of(op, output.dtype)});")
    for name in op.arrays:
        body.append(f"Point(&p.{layout.fields[name].path}, {name});")
    for name, value in _numbers(op):
        if name in layout.fields:
            body.append(f"Set(&p.{layout.fields[name].path}, {value});")
    body += [f"Run(kOp, fdsd_{op.name}(&p));", f"return {{{', '.join(op.outputs)}}};"]
    arguments = [*(_argument(name, part) for name, part in op.inputs.items())]
    arguments += [f"{_attribute_type(part)} {name}" for name, part in op.attributes.items()]
    lines = [
        f'extern "C" fdsd::Error fdsd_{op.name}(const fdsd::{op.struct}* p);',
        f"static std::vector<Tensor> Run_{op.name}({', '.join(arguments)}) {{",
        *(f"  {line}" for line in body),
        "}",
        f"PD_BUILD_OP(fdsd_{op.name})",
        *(f"    {line}" for line in _registration(op)),
        "",
    ]
    return "\n".join(lines)


def _argument(name: str, part: In) -> str:
    tensor = "OptionalTensor" if part.optional else "Tensor"
    return f"{tensor}& {name}" if isinstance(part, InOut) else f"const {tensor}& {name}"


def _attribute_type(part: Attr) -> str:
    return "int" if isinstance(part.type, tuple) else _ATTRIBUTE_TYPES[part.type]


def _read(op: Declaration, name: str) -> Iterator[str]:
    """Verify one input, and take the sizes that it tells."""
    part, steps = op.inputs[name], op.steps[name]
    tensor = f"*{name}" if part.optional else name
    dtypes = part.dtype if isinstance(part.dtype, tuple) else (part.dtype,)
    allowed = ", ".join(_dtype_of(op, dtype) for dtype in dtypes)
    known = ", ".join("kUnknown" if step.unknown else step.size.cpp() for step in steps)
    texts = ", ".join(f'"{step.size.text}"' for step in steps)
    expected = f"{{{known}}}, {{{texts}}}"
    call = f'Verify(kOp, "{name}", {tensor}, {{{allowed}}}, {expected})'
    if part.optional:
        yield f"if ({name}) {call};"
        return
    if not any(step.unknown for step in steps):
        yield f"{call};"
        return
    yield f"const Shape {name}_shape = {call};"
    for i, step in enumerate(steps):
        if step.unknown is not None and step.inverse is not None:
            yield f"const int64_t {step.unknown} = {step.inverse.cpp(f'{name}_shape[{i}]')};"
    if any(step.size.text != step.unknown for step in steps if step.unknown):
        solved = ", ".join(step.size.cpp() for step in steps)
        yield f'if ({name}_shape != Shape{{{solved}}}) FailShape(kOp, "{name}", {name}_shape, {expected});'


def _dtype_of(op: Declaration, name: str) -> str:
    """The type itself, that which an attribute names, or that of an argument."""
    if name in op.attributes:
        return f"DTypeOfCode({name})"
    return f"DataType::{name.upper()}" if name in ELEMENT_BYTES else f"{name}.dtype()"


def _numbers(op: Declaration) -> Iterator[tuple[str, str]]:
    yield from ((name, name) for name in (*op.attributes, *op.sizes))
    yield from ((name, value.cpp()) for name, value in op.values.items())
    yield from ((name, f"DTypeCode({argument}.dtype())") for name, argument in op.dtype_codes.items())


def _registration(op: Declaration) -> Iterator[str]:
    in_place = {name: part for name, part in op.inputs.items() if isinstance(part, InOut)}
    outputs = [f'"{name}"' for name in op.outputs]
    outputs += [_named(f"{name}_out", part) for name, part in in_place.items()]
    yield f".Inputs({{{_listed(_named(name, part) for name, part in op.inputs.items())}}})"
    yield f".Outputs({{{_listed(outputs)}}})"
    if op.attributes:
        attributes = (f'"{name}: {_attribute_type(part)}"' for name, part in op.attributes.items())
        yield f".Attrs({{{_listed(attributes)}}})"
    if in_place:
        pairs = (f"{{{_named(name, part)}, {_named(f'{name}_out', part)}}}" for name, part in in_place.items())
        yield f".SetInplaceMap({{{_listed(pairs)}}})"
    yield f".SetKernelFn(PD_KERNEL(Run_{op.name}));"


def _named(name: str, part: In) -> str:
    return f'paddle::Optional("{name}")' if part.optional else f'"{name}"'


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts)
