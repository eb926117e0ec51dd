"""Gated delta nets: a text has the same bits however steps cut it; what the op refuses, before it writes anything."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops.gated_delta import gated_delta_net_
from fastdeploy_sd.types import offsets
from tests.ops.backends import isa, threads
from tests.ops.cases.case import OpCases, arrays, mapped
from tests.ops.cases.gated_delta import DeltaRequest, DeltaShape, delta_case
from tests.ops.cuda_device import OpRunner
from tests.ops.delta_texts import DeltaServer

SHAPES = [DeltaShape(), DeltaShape(1, 4, 8, 48, 2), DeltaShape(2, 2, 5, 19, 8)]


@pytest.mark.parametrize("level", library.available_isas())
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_text_has_the_same_bits_however_steps_cut_it(shape: DeltaShape, dtype: str, level: str) -> None:
    """With drafts rejected at every place, snapshots at every place, requests in batches and any number of threads."""
    for seed in range(6):
        server = DeltaServer(seed, shape, dtype, max_drafts=int(seed % 3 * 3), num_rows=5)
        with isa(level):
            texts = [server.text(count) for count in (1, 40, 150)]
            with threads((1, 2, 7)[seed % 3]):
                server.serve(texts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "uint16", "float16"])
def test_a_text_has_the_same_bits_on_a_gpu(dtype: str, device: OpRunner) -> None:
    for seed, shape in enumerate(SHAPES):
        server = DeltaServer(seed, shape, dtype, max_drafts=4, num_rows=4)
        with device.runs_ops():
            server.serve([server.text(count) for count in (3, 50)])


def test_a_head_has_the_same_bits_whatever_heads_there_are() -> None:
    """As ranks have a part of the heads each."""
    shape, half = DeltaShape(2, 4, 16, 32, 4), DeltaShape(1, 2, 16, 32, 4)
    case = delta_case(3, shape, "float32", [DeltaRequest(40, 40), DeltaRequest(4, 1, 2, ends=(2,))])
    keys, values = half.key_heads * half.key_dim, half.value_heads * half.value_dim
    whole = OpCases.copied(case)
    want = gated_delta_net_(**whole)
    for rank in range(2):
        starts = np.array([0, 2 * keys, 4 * keys, 4 * keys + 2 * values])
        sizes = np.array([keys, keys, values, values])
        qkvz = np.concatenate(
            [np.arange(size) + start + rank * size for start, size in zip(starts, sizes, strict=True)]
        )
        qkv = qkvz[: half.qkv]
        heads = np.arange(2) + 2 * rank
        gates = np.concatenate([heads, heads + 4])
        weights, memory = case["weights"], case["memory"]
        columns = {"conv": weights.conv[:, qkv], "a_log": weights.a_log[heads], "dt_bias": weights.dt_bias[heads]}
        mine = {
            "qkvz": case["qkvz"][:, qkvz],
            "ba": case["ba"][:, gates],
            "weights": type(weights)(**columns, norm=weights.norm, eps=weights.eps),
            "memory": type(memory)(
                memory.state[:, heads], memory.conv[:, :, qkv], memory.drafts[:, :, [*qkv, *(gates + shape.qkv)]]
            ),
            "states": case["states"],
            "query_start_loc": case["query_start_loc"],
        }
        mine = OpCases.copied({name: mapped(value, np.ascontiguousarray) for name, value in mine.items()})
        y = gated_delta_net_(**mine)
        np.testing.assert_array_equal(y, want[:, rank * values : (rank + 1) * values])
        np.testing.assert_array_equal(mine["memory"].state, whole["memory"].state[:, heads])


def test_rows_after_the_requests_become_zeros() -> None:
    _assert_padding_is_cleared()


def test_rows_after_the_requests_become_zeros_on_a_gpu(device: OpRunner) -> None:
    with device.runs_ops():
        _assert_padding_is_cleared()


def _assert_padding_is_cleared() -> None:
    case = delta_case(1, DeltaShape(), "float32", [DeltaRequest(3, 3), DeltaRequest(2, 1, 1)], num_padding=4)
    y = gated_delta_net_(**case)
    assert np.abs(y[:5]).min() > 0
    assert not y[5:].any()


TWO = [DeltaRequest(3, 2, 1, "none", (1, 3)), DeltaRequest(2, 2, source="snapshot")]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_start_loc", [0, 3, 2], "query_start_loc: expected 0 and rising offsets up to the rows of qkvz"),
        ("query_start_loc", [0, 3, 6], "query_start_loc: expected 0 and rising offsets up to the rows of qkvz"),
        ("cu_snapshots", [0, 2, 3], "cu_snapshots: expected 0 and rising offsets up to the number of snapshot_ends"),
        ("cu_snapshots", [1, 2, 2], "cu_snapshots: expected 0 and rising offsets"),
        ("table_rows", [0, 4], "table_rows: expected rows of the request table"),
        ("table_rows", [-1, 1], "table_rows: expected rows of the request table"),
        ("table_rows", [3, 3], "table_rows: expected each row once"),
        ("source", [-2, -1], "source: expected the request's own slot, a snapshot's or -1"),
        ("source", [8, -1], "source: expected the request's own slot, a snapshot's or -1"),
        ("source", [5, -1], "source: expected a snapshot that the step does not write"),
        ("num_replayed", [2, 0], "num_replayed: expected 0..max_drafts"),
        ("num_replayed", [-1, 0], "num_replayed: expected 0..max_drafts"),
        ("num_certain", [4, 2], "num_certain: expected 0 to the request's rows"),
        ("num_certain", [1, 2], "num_certain: expected at most max_drafts rows after the certain ones"),
        ("snapshot_ends", [0, 3], "snapshot_ends: expected rising numbers"),
        ("snapshot_ends", [3, 3], "snapshot_ends: expected rising numbers"),
        ("snapshot_ends", [1, 5], "snapshot_ends: expected rising numbers"),
        ("snapshot_slots", [3, 4], "snapshot_slots: expected slots of snapshots"),
        ("snapshot_slots", [4, 8], "snapshot_slots: expected slots of snapshots"),
        ("snapshot_slots", [4, 4], "snapshot_slots: expected each slot once"),
        ("source", [-1], r"source: expected shape \[2\], got \[1\]"),
    ],
)
def test_contradictions_are_refused_and_then_nothing_is_written(name: str, value: list[int], message: str) -> None:
    case = delta_case(2, DeltaShape(), "float32", TWO)
    before = OpCases.copied(case)["memory"]
    array = np.array(value, np.int32)
    changed = {name: array} if name in case else {"states": case["states"]._replace(**{name: array})}
    with pytest.raises(ValueError, match=f"gated_delta_net: {message}"):
        gated_delta_net_(**{**case, **changed})
    for got, want in zip(arrays(case["memory"]), arrays(before), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (DeltaShape(width=9), "conv_weight: expected 2..8 rows"),
        (DeltaShape(width=1), "conv_weight: expected 2..8 rows"),
        (DeltaShape(3, 4), "state: expected a multiple of the key heads in conv_weight"),
    ],
)
def test_sizes_that_no_kernel_has_are_refused(shape: DeltaShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_delta_net_(**delta_case(2, shape, "float32", TWO))


def test_a_head_larger_than_a_gpu_has_registers_for_is_refused(device: OpRunner) -> None:
    case = delta_case(2, DeltaShape(key_dim=136), "float32", TWO)
    with device.runs_ops(), pytest.raises(ValueError, match="state: expected heads of at most 128 rows and columns"):
        gated_delta_net_(**case)


def test_a_request_without_rows_has_no_snapshot() -> None:
    case = delta_case(2, DeltaShape(), "float32", TWO)
    case["query_start_loc"] = offsets([0, 2])
    with pytest.raises(ValueError, match="cu_snapshots: expected none of a request without rows"):
        gated_delta_net_(**case)
