"""Cases of gated_delta_net_."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.ops import gated_delta as ops
from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.delta_memory import DeltaMemory, DeltaStates, DeltaWeights
from fastdeploy_sd.ops.reference import gated_delta as reference
from fastdeploy_sd.types import offsets
from tests.ops.cases.case import Kwargs, OpCases

I32 = np.int32


class DeltaShape(NamedTuple):
    """Heads of keys and values, their sizes, and the convolution's width."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    width: int = 4

    @property
    def qkv(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class DeltaRequest(NamedTuple):
    """One request of a step; source: "own", "none" or "snapshot"; ends of snapshots count replayed rows too."""

    num_new: int
    num_certain: int
    num_replayed: int = 0
    source: str = "own"
    ends: tuple[int, ...] = ()


def weights_of(rng: np.random.Generator, shape: DeltaShape) -> DeltaWeights[Any]:
    f32 = np.float32
    return DeltaWeights(
        conv=rng.standard_normal((shape.width, shape.qkv), f32) / f32(np.sqrt(shape.width)),
        a_log=np.log(rng.uniform(0.05, 4.0, shape.value_heads)).astype(f32),
        dt_bias=rng.standard_normal(shape.value_heads).astype(f32),
        norm=rng.uniform(0.5, 1.5, shape.value_dim).astype(f32),
        eps=1e-6,
    )


def memory_of(
    rng: np.random.Generator, shape: DeltaShape, dtype: str, num_rows: int, num_snapshots: int, max_drafts: int
) -> DeltaMemory[Any]:
    slots = num_rows + num_snapshots
    state = rng.standard_normal((slots, shape.value_heads, shape.key_dim, shape.value_dim), np.float32)
    conv = rng.standard_normal((slots, shape.width - 1, shape.qkv), np.float32)
    drafts = rng.standard_normal((num_rows, max_drafts, shape.qkv + 2 * shape.value_heads), np.float32)
    return DeltaMemory(state, narrow(conv, dtype), narrow(drafts, dtype))


def delta_case(
    seed: int, shape: DeltaShape, dtype: str, requests: Sequence[DeltaRequest], num_padding: int = 0
) -> dict[str, Any]:
    """A step of these requests, in rows of the table in any order; slots that no request writes are read."""
    rng = np.random.default_rng(seed)
    num_rows = len(requests) + 2
    num_ends = sum(len(request.ends) for request in requests)
    max_drafts = max((max(r.num_new - r.num_certain, r.num_replayed) for r in requests), default=0)
    table_rows = rng.permutation(num_rows)[: len(requests)].astype(I32)
    read = num_rows + num_ends
    sources = [{"own": row, "none": -1, "snapshot": read + r % 2} for r, row in enumerate(table_rows.tolist())]
    num_tokens = sum(request.num_new for request in requests) + num_padding
    width = shape.qkv + shape.value_heads * shape.value_dim
    gates = rng.standard_normal((num_tokens, 2 * shape.value_heads), np.float32) * 4
    gates[:1, :] = np.resize([-200.0, 200.0, 0.0], gates.shape[1])
    return {
        "qkvz": narrow(rng.standard_normal((num_tokens, width), np.float32) * 2, dtype),
        "ba": narrow(gates, dtype),
        "weights": weights_of(rng, shape),
        "memory": memory_of(rng, shape, dtype, num_rows, num_ends + 2, max_drafts),
        "states": DeltaStates(
            table_rows=table_rows,
            source=np.array([found[request.source] for found, request in zip(sources, requests, strict=True)], I32),
            num_replayed=np.array([request.num_replayed for request in requests], I32),
            num_certain=np.array([request.num_certain for request in requests], I32),
            cu_snapshots=offsets([len(request.ends) for request in requests]),
            snapshot_ends=np.array([end for request in requests for end in request.ends], I32),
            snapshot_slots=(num_rows + rng.permutation(num_ends)).astype(I32),
        ),
        "query_start_loc": offsets([request.num_new for request in requests]),
    }


# A first step, decoding, drafts of which some were accepted, a prefix hit, and one without rows.
MIXED = (
    DeltaRequest(5, 5, source="none"),
    DeltaRequest(1, 1),
    DeltaRequest(4, 1, 2, ends=(1, 3, 5)),
    DeltaRequest(0, 0),
    DeltaRequest(70, 70, source="snapshot", ends=(64, 70)),
    DeltaRequest(3, 0, 3),
    DeltaRequest(2, 0, 0, source="snapshot", ends=(1,)),
    DeltaRequest(3, 0, 0, source="none"),
)
SHAPES = {
    "mixed": DeltaShape(),
    "one-head": DeltaShape(1, 1, 16, 16, 2),
    "a-head-each": DeltaShape(3, 3, 32, 16, 8),
    "four-each": DeltaShape(1, 4, 8, 48, 3),
    "ragged": DeltaShape(2, 2, 5, 19, 5),
    "wide": DeltaShape(1, 2, 128, 128, 4),
}


def inputs() -> dict[str, dict[str, Any]]:
    """Every shape and dtype with requests of all kinds; no request, no row, only padding, rows of padding."""
    found = {
        f"{name}-{dtype}": delta_case(seed, shape, dtype, MIXED[:5] if name == "wide" else MIXED)
        for seed, (name, shape) in enumerate(SHAPES.items())
        for dtype in ("float32", "uint16")
    }
    shape = DeltaShape()
    found["no-request"] = delta_case(10, shape, "float32", [])
    found["only-padding"] = delta_case(11, shape, "uint16", [], 3)
    found["no-row"] = delta_case(12, shape, "uint16", [DeltaRequest(0, 0)] * 2)
    found["no-drafts"] = delta_case(13, shape, "float32", [DeltaRequest(3, 3, source="none"), DeltaRequest(1, 1)])
    return found


def taken(kwargs: Kwargs, rows: Sequence[int]) -> Kwargs:
    """The arguments of some requests alone."""
    start, states = kwargs["query_start_loc"], kwargs["states"]
    tokens = [token for r in rows for token in range(start[r], start[r + 1])]
    ends = [i for r in rows for i in range(states.cu_snapshots[r], states.cu_snapshots[r + 1])]
    per_request = {name: getattr(states, name)[list(rows)] for name in DeltaStates._fields[:4]}
    return {
        **kwargs,
        "qkvz": kwargs["qkvz"][tokens],
        "ba": kwargs["ba"][tokens],
        "query_start_loc": offsets([start[r + 1] - start[r] for r in rows]),
        "states": DeltaStates(
            **per_request,
            cu_snapshots=offsets([states.cu_snapshots[r + 1] - states.cu_snapshots[r] for r in rows]),
            snapshot_ends=states.snapshot_ends[ends],
            snapshot_slots=states.snapshot_slots[ends],
        ),
    }


# Sums of up to 128 products, after up to 75 rows.
GATED_DELTA_NET = OpCases(
    "gated_delta_net", ops.gated_delta_net_, reference.gated_delta_net_, inputs(), ops.GATED_DELTA_NET, take=taken,
    rtol=3e-5, atol=3e-5,
)  # fmt: skip
