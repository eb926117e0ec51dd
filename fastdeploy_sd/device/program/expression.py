"""Sizes in the declaration of an op: expressions over named sizes, such as `(num_heads + 2*num_kv_heads)*head_dim`.

Allowed are names, integers, + - * / in parentheses, and calls: `itemsize(x)`, the bytes of an element of argument x,
and the size functions of the kernel library (`packed_linear_bytes(...)` is fdsd_packed_linear_bytes). An expression can
be computed, solved for one of its names, or written as C++. Knows no op.
"""

from __future__ import annotations

import ast
import ctypes
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastdeploy_sd.device.library import returned

GOT = "got"  # the value of an expression, in the one that solves it


def _quotient(a: Any, b: Any) -> Any:
    return a // b if b else 0


_OPERATORS: Mapping[type[ast.operator], tuple[str, Callable[[Any, Any], Any], type[ast.operator]]] = {
    ast.Add: ("+", operator.add, ast.Sub),
    ast.Sub: ("-", operator.sub, ast.Add),
    ast.Mult: ("*", operator.mul, ast.Div),
    ast.Div: ("/", _quotient, ast.Mult),
}


def parse(text: str) -> tuple[Expression, ...]:
    """Return the expressions in a text, which are separated by commas.

    Raises ValueError: something in it is not allowed.
    """
    try:
        tree = ast.parse(f"({text},)", mode="eval").body
    except SyntaxError:
        raise ValueError(f"sizes: expected expressions with commas between, got {text!r}") from None
    assert isinstance(tree, ast.Tuple)
    return tuple(Expression(node) for node in tree.elts)


class Expression:
    """One size; `names` are those it is made of, `itemsize(x)` among them. Raises ValueError: it is not allowed."""

    def __init__(self, node: ast.expr) -> None:
        self._node = node
        self.text = ast.unparse(node).replace(" * ", "*").replace(" / ", "/")
        self.names = frozenset(_names(node))

    def value(self, known: Mapping[str, Any]) -> Any:
        """Return the size from those in `known`: an integer or, in a recording, a Size.

        A quotient loses its rest; that by 0 is 0.
        """
        return _value(self._node, known)

    def cpp(self, got: str = GOT) -> str:
        """Return it in C++, over variables with the names of the sizes; `got` stands for GOT."""
        return _cpp(self._node, got)

    def solved_for(self, name: str) -> Expression:
        """Return the value of one of the names, from the others and the value of this expression, GOT.

        Quotients lose their rest: whether this expression has that value must be looked at afterwards. Raises
        ValueError: the name occurs twice, in a call, or to the right of a - or /.
        """
        node, inverse = self._node, ast.Name(GOT)
        solved: ast.expr = inverse
        while isinstance(node, ast.BinOp):
            inside, other = (node.left, node.right) if name in _names(node.left) else (node.right, node.left)
            if name in _names(other) or (inside is node.right and isinstance(node.op, ast.Sub | ast.Div)):
                break
            solved = ast.BinOp(solved, _OPERATORS[type(node.op)][2](), other)
            node = inside
        if not isinstance(node, ast.Name):
            raise ValueError(f"{self.text}: expected {name} once, in no call and not after - or /, got it elsewhere")
        return Expression(solved)


def _names(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Name(name):
            yield name
        case ast.Constant(int()):
            pass
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            yield from _names(left)
            yield from _names(right)
        case ast.Call(ast.Name("itemsize"), [ast.Name()], []):
            yield ast.unparse(node)
        case ast.Call(ast.Name(), args, []):
            for arg in args:
                yield from _names(arg)
        case _:
            raise ValueError(f"sizes: expected names, integers, + - * / and calls, got {ast.unparse(node)}")


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(name):
            return known[name]
        case ast.Constant(value):
            return value
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)][1](_value(left, known), _value(right, known))
        case ast.Call(ast.Name("itemsize")):
            return known[ast.unparse(node)]
        case ast.Call(ast.Name(function), args):
            return returned(function, ctypes.c_int64, *(_value(arg, known) for arg in args))
    raise AssertionError(ast.unparse(node))


def _cpp(node: ast.expr, got: str) -> str:
    match node:
        case ast.Name(name):
            return got if name == GOT else name
        case ast.BinOp(left, ast.Div(), right):
            return f"Quotient({_cpp(left, got)}, {_cpp(right, got)})"
        case ast.BinOp(left, op, right):
            return f"({_cpp(left, got)} {_OPERATORS[type(op)][0]} {_cpp(right, got)})"
        case ast.Call(ast.Name("itemsize"), [ast.Name(name)]):
            return f"ElementBytes({name})"
        case ast.Call(ast.Name(function), args):
            return f"fdsd_{function}({', '.join(_cpp(arg, got) for arg in args)})"
    return ast.unparse(node)
