"""Experts that ranks share: the bytes of moe_ffn in one process, whoever runs which expert when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.moe import moe_ffn
from fastdeploy_sd.ops.packing import PackedExperts
from tests.ops.backends import threads
from tests.ops.cases.experts import run_layer
from tests.ops.expert_model import Layer, Ranks, linear_placement, random_layer, ranks_of
from tests.ops.ranks import on_threads
from tests.ops.test_grouped_linear import matrix, packed

GROUPS: dict[str, Any] = {"sigmoid": True, "num_groups": 4, "num_chosen_groups": 2, "scale": 2.5}


def in_one_process(layer: Layer, x: np.ndarray, **options: Any) -> np.ndarray:
    y: np.ndarray = moe_ffn(
        x,
        layer.router_weight,
        layer.gate_up,
        layer.down,
        gate_up_bias=layer.biases[0],
        down_bias=layer.biases[1],
        gate_limit=layer.gate_limit,
        **layer.routing,
        **options,
    )
    return y


def on_ranks(ranks: Ranks, xs: Sequence[Sequence[np.ndarray]], delay: float = 0.0, **options: Any) -> None:
    """Run passes over all layers on all ranks at once, and compare what each gets with one process.

    Args:
        xs: by rank: the tokens of each of its passes.
        delay: seconds that a rank waits at most before a layer.
    """
    last = len(ranks.layers) - 1

    def passes(rank: int) -> list[list[np.ndarray]]:
        rng, service, found = np.random.default_rng(rank), ranks.services[rank], []
        for x in xs[rank]:
            ys = []
            for i, layer in enumerate(ranks.layers):
                time.sleep(rng.random() * delay)
                of_pass = {"is_first": i == 0, "is_last": i == last}
                ys.append(run_layer(service, x, layer.router_weight, i, **layer.routing, **options, **of_pass))
            found.append(ys)
        return found

    for rank, got in enumerate(on_threads(len(xs), passes)):
        assert not isinstance(got, Exception), f"rank {rank}: {got}"
        for p, ys in enumerate(got):
            for i, y in enumerate(ys):
                want = in_one_process(ranks.layers[i], xs[rank][p], **options)
                np.testing.assert_array_equal(bits(y), bits(want), err_msg=f"rank {rank}, pass {p}, layer {i}")


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32) if array.dtype == np.float32 else array


def tokens(seed: int, count: int, hidden: int, dtype: Any = np.float32) -> np.ndarray:
    x: np.ndarray = np.random.default_rng(seed).standard_normal((count, hidden), np.float32)
    return to_bf16(x) if dtype == np.uint16 else x


def gguf_layer(name: str, num_experts: int) -> Layer:
    """Experts in a format whose scales are of groups."""
    size, parts = 256, []
    for rows in (2 * size, size):
        whole = matrix((name, num_experts * rows), num_columns=size)
        own = [packed(whole.rows([range(e * rows, (e + 1) * rows)]), BLOCK_TYPES[name].fmt) for e in range(num_experts)]
        data = WeightMemory().take(sum(part.data.nbytes for part in own))
        data[:] = np.concatenate([part.data for part in own])
        parts.append(PackedExperts(data, num_experts, size, rows, own[0].format))
    router = np.random.default_rng(3).standard_normal((num_experts, size), np.float32)
    return Layer(router, parts[0], parts[1], {"top_k": 2, "normalize": True, "norm_min": 1e-12})


LAYERS: dict[str, Callable[[], Layer]] = {
    "float32": lambda: random_layer(0, (7, 40, 24)),
    "bfloat16": lambda: random_layer(1, (7, 150, 70), "bfloat16", top_k=1),
    "wint8": lambda: random_layer(2, (9, 150, 70), "wint8", top_k=8),
    "wint4": lambda: random_layer(3, (8, 150, 70), "wint4"),
    "fp8": lambda: random_layer(4, (8, 150, 70), "fp8"),
    "groups": lambda: random_layer(5, (12, 50, 24), top_k=5, **GROUPS),
    "gpt-oss": lambda: random_layer(6, (6, 64, 32), "bfloat16", has_bias=True, gate_limit=1.5),
    "mxfp4": lambda: gguf_layer("MXFP4", 5),
    "q4_k": lambda: gguf_layer("Q4_K", 4),
}


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_get_the_bytes_of_one_process(name: str, dtype: Any) -> None:
    """Each has its own tokens: none, one, as many as fit, one more, several rounds of them."""
    layer = LAYERS[name]()
    hidden = layer.down.out_features
    for num_ranks in (1, 2, 3, 4):
        xs = [
            [tokens(10 * r + p, (0, 1, 4, 5, 23)[(r + p) % 5], hidden, dtype) for p in range(5)]
            for r in range(num_ranks)
        ]
        placement = linear_placement(layer.num_experts, num_ranks)
        with threads(1), ranks_of([layer, layer], placement, dtype, max_tokens=4) as ranks:
            on_ranks(ranks, xs, num_slices=4)
