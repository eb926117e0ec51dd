"""Cases of moe_ffn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.ops import moe as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.reference import moe as reference
from tests.ops.cases.case import OpCases
from tests.ops.expert_model import pack_experts


def inputs(formats: Sequence[LinearFormat] = LINEAR_FORMATS) -> dict[str, dict[str, Any]]:
    """No token, one, many; one expert, all, more than a vector of them; biased choice; equal experts; bf16."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, sizes: tuple[int, int, int, int], top_k: int, fmt: str, **changes: Any) -> dict[str, Any]:
        tokens, hidden, inner, experts = sizes
        found[f"{fmt}-{name}"] = {
            "x": rng.standard_normal((tokens, hidden), np.float32),
            "router_weight": (rng.standard_normal((experts, hidden)) / np.sqrt(hidden)).astype(np.float32),
            "gate_up": (rng.standard_normal((experts, 2 * inner, hidden)) / np.sqrt(hidden)).astype(np.float32),
            "down": (rng.standard_normal((experts, hidden, inner)) / np.sqrt(inner)).astype(np.float32),
            "fmt": fmt,
            "top_k": top_k,
            "normalize": True,
            "norm_min": 1e-12,
            "selection_bias": None,
            "shared": None,
        } | changes
        return found[f"{fmt}-{name}"]

    for fmt in formats:
        add("no-token", (0, 16, 16, 2), 1, fmt)
        add("one-expert", (3, 16, 8, 1), 1, fmt)
        add("all-experts", (5, 33, 17, 4), 4, fmt, normalize=False)
        add("many-experts", (40, 40, 24, 37), 3, fmt)
        add("large-norm-min", (4, 32, 16, 4), 2, fmt, norm_min=3.0)
    for fmt in formats:
        for count in (2, 4):
            add(f"{count}-slices", (9, 40, 24, 13), 5, fmt, num_slices=count)
        part = add("part", (9, 40, 24, 13), 5, fmt, num_slices=2, first_expert=3, out_dtype=np.float32)
        part["gate_up"], part["down"] = part["gate_up"][3:9], part["down"][3:9]
        last = add("last", (3, 16, 8, 5), 2, fmt, num_slices=4, first_expert=4)
        last["gate_up"], last["down"] = last["gate_up"][4:], last["down"][4:]
    add("bias", (20, 32, 16, 8), 2, "float32", selection_bias=rng.standard_normal(8).astype(np.float32))
    bias = np.array([0, 9] * 4, np.float32)
    add("bias-unnormalized", (20, 32, 16, 8), 2, "float32", selection_bias=bias, normalize=False)
    add("logit-bias", (20, 32, 16, 8), 2, "float32", router_bias=rng.standard_normal(8).astype(np.float32))
    groups = {"sigmoid": True, "num_groups": 4, "num_chosen_groups": 2, "scale": 2.5}
    for name, normalize in (("groups", True), ("groups-unnormalized", False)):
        of_experts = rng.standard_normal(36, np.float32)
        add(name, (30, 32, 16, 36), 5, "float32", selection_bias=of_experts, normalize=normalize, **groups)
    add("sigmoid", (9, 32, 16, 5), 2, "float32", sigmoid=True)
    equal = add("equal-groups", (6, 32, 16, 32), 8, "float32", **groups)
    equal["router_weight"][:] = equal["router_weight"][0]
    for fmt in ("float32", "bfloat16", "wint8"):
        biases = {
            "gate_up_bias": rng.standard_normal((6, 48), np.float32),
            "down_bias": rng.standard_normal((6, 50), np.float32),
        }
        add("biases", (9, 50, 24, 6), 2, fmt, **biases)
        clamped = add("clamped", (9, 50, 24, 6), 2, fmt, gate_limit=1.5, num_slices=2, **biases)
        clamped["gate_up"] = clamped["gate_up"] * np.float32(2)
    ties = add("ties", (6, 32, 16, 18), 5, "float32")
    ties["router_weight"][:] = ties["router_weight"][0]
    for fmt in ("float32", "bfloat16"):
        bits = add("bf16", (9, 48, 24, 6), 2, fmt)
        bits |= {name: to_bf16(bits[name]) for name in ("x", "gate_up", "down")}
        found[f"{fmt}-bf16"] = bits
        shared = add("shared", (9, 50, 24, 6), 2, fmt)
        shared["shared"] = rng.standard_normal((9, 50), np.float32)
        both = add("shared-bf16", (9, 50, 24, 6), 2, fmt)
        both["x"], both["shared"] = to_bf16(both["x"]), to_bf16(shared["shared"])
    return found


def packed_and_run(x: Any, router_weight: Any, gate_up: np.ndarray, down: np.ndarray, fmt: Any, **options: Any) -> Any:
    return ops.moe_ffn(x, router_weight, pack_experts(gate_up, fmt), pack_experts(down, fmt), **options)


def sum_of_the_chosen(num_slices: int = 1, **kwargs: Any) -> Any:
    """Slices change the order of a sum, and the definition's sums are exact."""
    return reference.moe_ffn(**kwargs)


# Outputs are of order 1.
MOE_FFN = OpCases(
    "moe_ffn",
    packed_and_run,
    sum_of_the_chosen,
    inputs(),
    ops.MOE_FFN,
    on_host={"gate_up", "down"},
    rtol=1e-5,
    atol=1e-5,
)
