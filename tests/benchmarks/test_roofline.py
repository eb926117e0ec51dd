"""The roofline: what a point is, and that every op is measured and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import hardware, kernels, roofline
from benchmarks.__main__ import main
from benchmarks.roofline import measure_op, measured_roofs
from benchmarks.roofline_ops import OpCall, other_ops
from fastdeploy_sd.device import library


@pytest.mark.usefixtures("ticking")
def test_a_point_is_an_op_in_bytes_and_operations() -> None:
    # Each round looks at the clock twice, a second apart, and makes two calls.
    ran: list[None] = []
    point = measure_op(OpCall("norm", "T=1", [lambda: ran.append(None)] * 2, 10**9, 4 * 10**9), 3)
    assert (point.us, point.gb_per_s, point.gop_per_s, point.intensity) == (500_000, 2, 8, 4)
    assert len(ran) == 2 * (1 + 3)


def test_roofs_are_those_of_every_level() -> None:
    before = library.isa()
    roofs = list(measured_roofs())
    assert {roof.level for roof in roofs} == set(library.available_isas()) - {"scalar"}
    assert all(roof.gop_per_s > 0 for roof in roofs)
    assert library.isa() == before


def test_attention_is_counted_by_the_keys_that_rows_see() -> None:
    calls = {(call.op, call.shape): call for call in other_ops((512,))}
    decode, prefill = calls["attention decode bf16", "8 x 1 at 512"], calls["attention prefill bf16", "1 x 512 at 512"]
    assert decode.num_operations == 8 * 512 * 16 * 128 * 4
    mixed = calls["attention mixed bf16", "1 x 16 + 7 x 1 at 512"]
    assert mixed.num_operations == decode.num_operations + (sum(range(497, 513)) - 512) * 16 * 128 * 4
    assert prefill.num_operations == 512 * 513 // 2 * 16 * 128 * 4
    assert decode.num_bytes == 8 * 512 * 8 * 128 * 2 * 2 + 8 * 16 * 128 * 2 * 2


def test_every_op_is_measured_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "STREAM_BYTES", 4 << 20)
    small = {"SHAPES": ((128, 64),), "HEAD": (64, 256), "ROWS": (1, 2), "WORKING_SET_BYTES": 1 << 18}
    for name, value in small.items():
        monkeypatch.setattr(roofline, name, value)
    plot = tmp_path / "deep" / "roofline.png"
    assert main(["roofline", "--rounds", "1", "--contexts", "64", "--plot", str(plot), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    products = {f"{kind} {fmt}" for kind in ("linear", "head") for fmt in kernels.FORMATS}
    attention = {f"attention {kind} {fmt}" for kind in ("decode", "mixed", "prefill") for fmt in ("bf16", "int8")}
    assert {point["op"] for point in record["points"]} == {"norm", "swiglu", "rope", "sampling", *products, *attention}
    assert all(point["us"] > 0 for point in record["points"])
    assert plot.read_bytes().startswith(b"\x89PNG")
