"""A declared op: what its arguments must be and how it says so, and that it is what the kernel library has."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.layout import layout, struct_type
from fastdeploy_sd.device.program import operator_files
from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, Attr, DTypeOf, In, InOut, Out, Value
from fastdeploy_sd.device.program.expression import GOT, parse
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.errors import ConfigError

HEADERS = "".join(path.read_text() for path in operator_files.headers(operator_files.source_root()))
PARTS: dict[str, Any] = {
    "x": In(ACTIVATIONS, "num_rows, hidden_size"),
    "residual": In(F32, "num_rows, hidden_size", optional=True),
    "weight": In(F32, "hidden_size"),
    "eps": Attr(float),
    "x_scale": Attr(float),
    "dtype": DTypeOf("x"),
    "y": Out("x", "num_rows, hidden_size"),
    "residual_out": Out(F32, "num_rows, hidden_size"),
}
RMS_NORM = HostOp("rms_norm", "num_rows", **PARTS)
X, WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)


def test_sizes_are_computed_and_solved_for() -> None:
    heads, quotient, call = parse("(h + 2*kv)*d, d*itemsize(k)/4, 3*packed_linear_bytes(128, 2*i, f)")
    known = {"h": 5, "kv": 3, "d": 16, "itemsize(k)": 2}
    assert heads.value(known) == 11 * 16
    assert heads.solved_for("h").value({**known, GOT: 11 * 16}) == 5
    assert heads.solved_for("d").value({**known, GOT: 11 * 16}) == 16
    assert quotient.names == {"d", "itemsize(k)"}
    assert quotient.solved_for("d").value({**known, GOT: 8}) == 16
    assert call.value({"i": 1, "f": 0}) % (3 * 64) == 0
    assert call.cpp() == "(3 * fdsd_packed_linear_bytes(128, (2 * i), f))"
    for text, name in (("3 - d", "d"), ("d*d", "d"), ("f(d)", "d")):
        with pytest.raises(ValueError, match=f"expected {name} once, in no call and not after - or /"):
            parse(text)[0].solved_for(name)
    for text in ("d**2", "d.size", "d[0]", "1.5", "f(x=1)"):
        with pytest.raises(ValueError, match="sizes: expected names, integers"):
            parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "x: expected an array, got None"),
        ({"x": [1.0]}, "x: expected an array, got list"),
        ({"x": X[0]}, r"x: expected shape \[num_rows, hidden_size\], got \[4\]"),
        ({"x": X.astype(np.float64)}, "x: expected float32 or bfloat16 or float16, got float64"),
        ({"x": X[:, ::2]}, "x: expected a contiguous array, got strides"),
        ({"residual": X[:2]}, r"residual: expected shape \[3, 4\], got \[2, 4\]"),
        ({"weight": np.ones(5, np.float32)}, r"weight: expected shape \[4\], got \[5\]"),
        ({"weight": np.ones(4, np.int32)}, "weight: expected float32, got int32"),
        ({"eps": None}, "eps: expected a value, got None"),
    ],
)
def test_an_argument_that_is_not_as_declared_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^rms_norm: {message}"):
        RMS_NORM(**{"x": X, "weight": WEIGHT, "eps": 1e-5, "x_scale": 1.0} | change)


def test_an_argument_that_nobody_declared_is_named() -> None:
    with pytest.raises(TypeError, match=r"rms_norm: expected arguments x, residual, .*, got wieght"):
        RMS_NORM(x=X, wieght=WEIGHT, eps=1e-5, x_scale=1.0)


def test_a_bound_call_runs_on_as_many_rows_as_its_params_say() -> None:
    y, h = np.zeros_like(X), np.zeros_like(X)
    call = RMS_NORM.bind(x=X, weight=WEIGHT, eps=1e-5, x_scale=1.0, y=y, residual_out=h)
    assert (call.params.num_rows, call.params.hidden_size) == (3, 4)
    call.params.num_rows = 2
    call.run()
    np.testing.assert_array_equal(h, [*X[:2], np.zeros(4)])
    np.testing.assert_array_equal(y[:2], RMS_NORM(x=X, weight=WEIGHT, eps=1e-5, x_scale=1.0)[0][:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": InOut(F32, "hidden_size")}, r"weight: expected float32\*, the library has const float32\*"),
        ({"weight": In(I32, "hidden_size")}, r"weight: expected const int32\*, the library has const float32\*"),
        ({"eps": Attr(int)}, "eps: expected int32 or int64, the library has float32"),
        ({"epsilon": Attr(float)}, "epsilon: expected float32 or float64, the library has none"),
        ({"row_bytes": Value("4*hidden_size")}, "row_bytes: expected int32 or int64, the library has none"),
    ],
)
def test_a_declaration_that_is_not_the_librarys_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"op rms_norm: field {message}; run `scripts/dev build`"):
        HostOp("rms_norm", None, **PARTS | change).params_type  # noqa: B018


def test_a_field_that_is_not_declared_and_a_struct_that_is_none_are_errors() -> None:
    with pytest.raises(ConfigError, match="op rms_norm: field dtype: expected none, the library has int32"):
        HostOp("rms_norm", None, **{name: part for name, part in PARTS.items() if name != "dtype"}).params_type  # noqa: B018
    with pytest.raises(ConfigError, match="expected struct NoSuchOpParams, got none"):
        HostOp("no_such_op").params_type  # noqa: B018


def test_structs_lie_as_in_the_library_with_the_padding_of_structs_in_them() -> None:
    fields = layout("TopPCandidatesParams").fields
    assert fields["max_candidate_len"].offset % 8 == 0
    assert struct_type("TopPCandidatesParams").max_candidate_len.offset == fields["max_candidate_len"].offset
    assert layout("MtpPreprocessParams").fields["out_hidden"].path == "out.hidden"


@pytest.mark.parametrize("struct", sorted(set(re.findall(r"^struct (\w+Params) {", HEADERS, re.MULTILINE))))
def test_no_struct_has_more_fields_than_a_reader_can_hold(struct: str) -> None:
    """At most 16 members each, structs in structs counted as one."""
    members: dict[str, set[str]] = {}
    for field in layout(struct).fields.values():
        parts = field.path.split(".")
        for i, part in enumerate(parts):
            members.setdefault(".".join(parts[:i]), set()).add(part)
    assert {where: len(names) for where, names in members.items() if len(names) > 16} == {}
