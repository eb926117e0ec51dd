"""Cases of lora_shrink and lora_expand_."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdeploy_sd.ops import lora as ops
from fastdeploy_sd.ops.adapter_slots import AdapterSlots
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.reference import lora as reference
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.ops.cases.case import Kwargs, OpCases


@dataclass(frozen=True)
class Shape:
    """T rows of K inputs; parts that end at these columns; ranks by slot and part, at most `max_rank`."""

    num_rows: int
    in_features: int
    part_ends: Sequence[int]
    ranks: Sequence[Sequence[int]]
    max_rank: int
    slices: SliceRule = WHOLE


SHAPES = {
    "no-rows": Shape(0, 8, [8], [[2]], 2),
    "one": Shape(1, 1, [1], [[1]], 1),
    "no-inputs": Shape(3, 0, [5], [[2], [1]], 3),
    "ragged": Shape(7, 37, [33, 40, 73], [[3, 0, 5], [0, 0, 0], [5, 5, 1]], 5),
    "slices": Shape(9, 130, [70], [[9], [16]], 16, SliceRule(4, 8)),
    "half": Shape(5, 70, [20], [[4], [4]], 4, SliceRule(2, 1)),
    "many-rows": Shape(75, 96, [520, 552], [[16, 16], [8, 16]], 16, SliceRule(4, 32)),
}


def adapters_of(shape: Shape, rng: np.random.Generator) -> AdapterSlots[np.ndarray]:
    """Random ones. What lies beyond a rank is NaN, which no kernel may read."""
    ranks = np.array(shape.ranks, np.int32)
    num_slots, num_parts = ranks.shape
    a = rng.standard_normal((num_slots, num_parts, shape.max_rank, shape.in_features)).astype(np.float32)
    b = rng.standard_normal((num_slots, shape.max_rank, shape.part_ends[-1])).astype(np.float32)
    is_unused = np.arange(shape.max_rank) >= ranks[..., None]
    a[is_unused] = np.nan
    for part, columns in enumerate(np.split(b, list(shape.part_ends[:-1]), axis=2)):
        columns.swapaxes(1, 2)[np.broadcast_to(is_unused[:, None, part], columns.swapaxes(1, 2).shape)] = np.nan
    return AdapterSlots(
        a=a.reshape(num_slots, num_parts * shape.max_rank, shape.in_features) / max(shape.in_features, 1) ** 0.5,
        b=b,
        ranks=ranks,
        scales=rng.uniform(0.5, 2, ranks.shape).astype(np.float32),
        part_ends=np.array(shape.part_ends, np.int32),
    )


def slots_of(shape: Shape, rng: np.random.Generator) -> I32:
    return rng.integers(-1, len(shape.ranks), shape.num_rows).astype(np.int32)


def narrowed(adapters: AdapterSlots[np.ndarray]) -> AdapterSlots[np.ndarray]:
    return replace(adapters, a=to_bf16(adapters.a), b=to_bf16(adapters.b))


def shrink_inputs() -> dict[str, Kwargs]:
    """Every shape in both types; rows with one adapter, none and several."""
    rng, found = np.random.default_rng(0), dict[str, Kwargs]()
    for name, shape in SHAPES.items():
        x = rng.standard_normal((shape.num_rows, shape.in_features)).astype(np.float32)
        slots, adapters = slots_of(shape, rng), adapters_of(shape, rng)
        found[name] = {"x": x, "slots": slots, "adapters": adapters, "slices": shape.slices}
        found[f"{name}-bf16"] = {**found[name], "x": to_bf16(x), "adapters": narrowed(adapters)}
    found["none"] = {**found["ragged"], "slots": np.full(7, -1, np.int32)}
    return found


def expand_inputs() -> dict[str, Kwargs]:
    """The same."""
    rng, found = np.random.default_rng(1), dict[str, Kwargs]()
    for name, shape in SHAPES.items():
        adapters = adapters_of(shape, rng)
        y = rng.standard_normal((shape.num_rows, shape.part_ends[-1])).astype(np.float32)
        u = rng.standard_normal((shape.num_rows, adapters.a.shape[1])).astype(np.float32)
        found[name] = {"y": y, "u": u, "slots": slots_of(shape, rng), "adapters": adapters}
        found[f"{name}-bf16"] = {**found[name], "y": to_bf16(y), "adapters": narrowed(adapters)}
    found["none"] = {**found["ragged"], "slots": np.full(7, -1, np.int32)}
    return found


def others_have_none(kwargs: Kwargs, rows: Sequence[int]) -> dict[str, Any]:
    """The same arrays, where only these rows have an adapter: the rest of y stays as it is."""
    slots = np.full_like(kwargs["slots"], -1)
    slots[list(rows)] = kwargs["slots"][list(rows)]
    return {**kwargs, "slots": slots}


LORA_SHRINK = OpCases(
    "lora_shrink", ops.lora_shrink, reference.lora_shrink, shrink_inputs(), ops.LORA_SHRINK, rtol=1e-5, atol=1e-5
)
LORA_EXPAND = OpCases(
    "lora_expand",
    ops.lora_expand_,
    reference.lora_expand_,
    expand_inputs(),
    ops.LORA_EXPAND,
    take=others_have_none,
    rtol=1e-5,
    atol=1e-5,
)
