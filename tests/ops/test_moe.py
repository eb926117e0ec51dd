"""moe_ffn over more tokens than go through at once, over a token with NaN, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.moe import moe_ffn
from fastdeploy_sd.ops.packing import PackedExperts
from fastdeploy_sd.ops.reference import collective as reference
from fastdeploy_sd.types.ranges import halved
from tests.ops.backends import threads
from tests.ops.expert_model import pack_experts
from tests.ops.test_grouped_linear import matrix, packed

HIDDEN, INNER, NUM_EXPERTS = 150, 70, 20
OPTIONS: dict[str, Any] = {"top_k": 3, "normalize": True, "norm_min": 1e-12}


@pytest.mark.parametrize(
    "formats", [("bfloat16", "bfloat16"), ("wint4", "wint4"), ("wint8", "float32"), ("e4m3", "e4m3")]
)
@pytest.mark.parametrize("one_expert", [False, True])
@pytest.mark.usefixtures("level")
def test_a_token_is_the_same_among_more_tokens_than_go_through_at_once(
    formats: tuple[LinearFormat, LinearFormat], one_expert: bool
) -> None:
    rng = np.random.default_rng(2)
    gate_up = pack_experts(rng.standard_normal((NUM_EXPERTS, 2 * INNER, HIDDEN), np.float32), formats[0])
    down = pack_experts(rng.standard_normal((NUM_EXPERTS, HIDDEN, INNER), np.float32), formats[1])
    router = rng.standard_normal((NUM_EXPERTS, HIDDEN), np.float32) / np.float32(np.sqrt(HIDDEN))
    bias = np.zeros(NUM_EXPERTS, np.float32)
    bias[7] = 2 * one_expert  # every token then chooses expert 7, which alone has more rows than a wave
    x = to_bf16(rng.standard_normal((600, HIDDEN), np.float32))

    def run(rows: np.ndarray) -> np.ndarray:
        return moe_ffn(rows, router, gate_up, down, selection_bias=bias, **OPTIONS)

    for num_threads in (1, 3):
        with threads(num_threads):
            together = run(x)
        for i in (0, 299, 599):
            np.testing.assert_array_equal(together[i : i + 1], run(x[i : i + 1]), err_msg=f"token {i}")


@pytest.mark.usefixtures("level")
def test_experts_of_integers_with_groups_give_a_token_the_same_among_others() -> None:
    """Their few rows multiply codes as they are read, more go through tiles where there are."""
    size, count, rng = 256, 4, np.random.default_rng(3)

    def experts(name: str, num_rows: int) -> PackedExperts[np.ndarray]:
        all_of_them = matrix((name, count * num_rows), num_columns=size)
        parts = [all_of_them.rows([range(e * num_rows, (e + 1) * num_rows)]) for e in range(count)]
        fmt = BLOCK_TYPES[name].fmt
        data = WeightMemory().take(sum(packed(part, fmt).data.nbytes for part in parts))
        data[:] = np.concatenate([packed(part, fmt).data for part in parts])
        return PackedExperts(data, count, size, num_rows, fmt)

    gate_up, down = experts("Q4_K", 2 * size), experts("Q6_K", size)
    router = rng.standard_normal((count, size), np.float32)
    x = rng.standard_normal((40, size), np.float32)
    together = moe_ffn(x, router, gate_up, down, **OPTIONS)
    for i in (0, 17, 39):
        np.testing.assert_array_equal(moe_ffn(x[i : i + 1], router, gate_up, down, **OPTIONS)[0], together[i])


def test_a_token_with_nan_does_not_touch_the_others() -> None:
    rng = np.random.default_rng(1)
    gate_up = pack_experts(rng.standard_normal((4, 16, 32), np.float32), "float32")
    down = pack_experts(rng.standard_normal((4, 32, 8), np.float32), "float32")
    router = rng.standard_normal((4, 32), np.float32)
    x = rng.standard_normal((3, 32), np.float32)
    want = moe_ffn(x, router, gate_up, down, **OPTIONS)
    x[1, 7] = np.nan
    got = moe_ffn(x, router, gate_up, down, **OPTIONS)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_ranks_that_add_in_the_tree_give_the_bytes_of_one(fmt: LinearFormat, level: str) -> None:
    rng = np.random.default_rng(7)
    gate_up = rng.standard_normal((NUM_EXPERTS, 2 * INNER, HIDDEN), np.float32)
    down = rng.standard_normal((NUM_EXPERTS, HIDDEN, INNER), np.float32)
    router = rng.standard_normal((NUM_EXPERTS, HIDDEN), np.float32)

    def run(x: np.ndarray, here: range, **options: Any) -> Any:
        packed = (pack_experts(weights[here.start : here.stop], fmt) for weights in (gate_up, down))
        options |= {**OPTIONS, "top_k": 6, "first_expert": here.start, "out_dtype": np.float32}
        return moe_ffn(x, router, next(packed), next(packed), **options)

    for num_tokens in (1, 7, 250):
        x = to_bf16(rng.standard_normal((num_tokens, HIDDEN), np.float32))
        shared = to_bf16(rng.standard_normal((num_tokens, HIDDEN), np.float32))
        plain = run(x, range(NUM_EXPERTS), shared=shared)
        for num_slices in (2, 4):
            want = run(x, range(NUM_EXPERTS), shared=shared, num_slices=num_slices)
            assert num_tokens == 1 or (want != plain).any()
            for num_ranks in (2, 4)[: num_slices // 2]:
                ranges = halved(NUM_EXPERTS, num_ranks, 1)
                parts = [run(x, part, num_slices=num_slices // num_ranks) for part in ranges]
                where = f"{level} {num_tokens} tokens, {num_ranks} ranks of {num_slices} slices"
                got = reference.all_reduce(parts, np.float32, shared=shared)
                np.testing.assert_array_equal(got, want, err_msg=where)


def test_bad_arguments_are_named() -> None:
    x: np.ndarray = np.zeros((1, 32), np.float32)
    router: np.ndarray = np.zeros((4, 32), np.float32)
    gate_up = pack_experts(np.zeros((4, 16, 32), np.float32), "float32")
    down = pack_experts(np.zeros((4, 32, 8), np.float32), "float32")
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=r"top_k: expected 1\.\.num_experts"):
            moe_ffn(x, router, gate_up, down, top_k=top_k, normalize=True, norm_min=0.0)
    for first_expert in (-1, 1):
        with pytest.raises(ValueError, match="first_expert: expected experts within the router's num_experts"):
            moe_ffn(x, router, gate_up, down, first_expert=first_expert, **OPTIONS)
    with pytest.raises(ValueError, match="num_slices: expected 1, 2 or 4"):
        moe_ffn(x, router, gate_up, down, num_slices=3, **OPTIONS)
    with pytest.raises(ValueError, match=r"router_weight: expected shape \[num_experts, 32\], got \[4, 31\]"):
        moe_ffn(x, router[:, :31].copy(), gate_up, down, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"gate_up: expected 4 matrices \[64, 16\] to fit down, got 4 matrices \[16, 32\]"
    ):
        moe_ffn(x, router, gate_up, gate_up, **OPTIONS)
    with pytest.raises(ValueError, match="weights: expected experts of one shape"):
        pack_experts([np.zeros((3, 4), np.float32), np.zeros((3, 5), np.float32)], "float32")
