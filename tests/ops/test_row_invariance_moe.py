"""A token's moe_ffn output has the same bits alone, in any batch and on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.native.moe import moe_ffn, pack_experts
from fastdeploy_sd.ops.reference.linear import LINEAR_FORMATS, LinearFormat
from tests.ops.backends import isa, threads

NUM_TOKENS, HIDDEN, INNER, NUM_EXPERTS = 40, 150, 70, 20
OPTIONS = {"top_k": 3, "normalize": True, "norm_min": 1e-12}


@pytest.fixture(params=library.available_isas())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with isa(request.param):
        yield request.param


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("level")
def test_a_token_is_the_same_alone_and_in_any_batch(fmt: LinearFormat, dtype: str) -> None:
    rng = np.random.default_rng(0)
    gate_up = pack_experts(rng.standard_normal((NUM_EXPERTS, 2 * INNER, HIDDEN), np.float32), fmt)
    down = pack_experts(rng.standard_normal((NUM_EXPERTS, HIDDEN, INNER), np.float32), fmt)
    router = rng.standard_normal((NUM_EXPERTS, HIDDEN), np.float32) / np.float32(np.sqrt(HIDDEN))
    bias = rng.standard_normal(NUM_EXPERTS).astype(np.float32) / 10
    x = rng.standard_normal((NUM_TOKENS, HIDDEN), np.float32)
    x = to_bf16(x) if dtype == "bfloat16" else x

    def run(rows: np.ndarray) -> np.ndarray:
        return moe_ffn(rows, router, gate_up, down, selection_bias=bias, **OPTIONS).view(np.uint16)

    alone = np.concatenate([run(x[i : i + 1]) for i in range(NUM_TOKENS)])
    for num_threads in (1, 2, 3):
        with threads(num_threads):
            for count in (2, 5, 13, NUM_TOKENS):
                np.testing.assert_array_equal(run(x[:count]), alone[:count], err_msg=f"{count} tokens")
            np.testing.assert_array_equal(run(np.ascontiguousarray(x[::-1]))[::-1], alone, err_msg="reversed")


@pytest.mark.parametrize("fmt", ["bfloat16", "wint4"])
@pytest.mark.parametrize("one_expert", [False, True])
@pytest.mark.usefixtures("level")
def test_a_token_is_the_same_among_more_tokens_than_go_through_at_once(fmt: LinearFormat, one_expert: bool) -> None:
    rng = np.random.default_rng(2)
    gate_up = pack_experts(rng.standard_normal((NUM_EXPERTS, 2 * INNER, HIDDEN), np.float32), fmt)
    down = pack_experts(rng.standard_normal((NUM_EXPERTS, HIDDEN, INNER), np.float32), fmt)
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


def test_bad_arguments_are_named() -> None:
    x, router = np.zeros((1, 32), np.float32), np.zeros((4, 32), np.float32)
    gate_up = pack_experts(np.zeros((4, 16, 32), np.float32), "float32")
    down = pack_experts(np.zeros((4, 32, 8), np.float32), "float32")
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=r"top_k: expected 1\.\.num_experts"):
            moe_ffn(x, router, gate_up, down, top_k=top_k, normalize=True, norm_min=0.0)
    with pytest.raises(ValueError, match="router_weight: expected contiguous float32"):
        moe_ffn(x, router[:3], gate_up, down, **OPTIONS)
    with pytest.raises(ValueError, match=r"gate_up: expected matrices \[64, 32\], got \[16, 32\]"):
        moe_ffn(x, router, gate_up, gate_up, **OPTIONS)
    with pytest.raises(ValueError, match="weights: expected experts of one shape"):
        pack_experts([np.zeros((3, 4), np.float32), np.zeros((3, 5), np.float32)], "float32")
