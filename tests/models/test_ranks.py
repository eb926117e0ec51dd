"""Two and four ranks compute the bits of one: hidden rows and logits on every rank, and the KV of its heads."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.worker.step.forward import Forward
from tests.models import golden, rewrite
from tests.models.ranks import rank_groups, together
from tests.models.steps import STEPS, Model, batches, cache_bits
from tests.ops.backends import isa, threads

pytestmark = pytest.mark.slow


class Run(NamedTuple):
    """What steps came to on one rank."""

    rows: list[np.ndarray]
    kv: list[np.ndarray]


def run(model: Model, forward: Forward, begin: Callable[[int], None], steps: Sequence[tuple[list[int], bool]]) -> Run:
    rows = []
    for i, step in enumerate(batches(steps)):
        model.load(step)
        begin(i + 1)
        rows += model.bits(forward)
    return Run(rows, cache_bits(model.caches if forward is model.recorded else model.eager_caches))


def assert_ranks_agree(
    name: Any, size: int, *args: Any, way: str = "recorded", steps: Sequence[tuple[list[int], bool]] = STEPS, **kv: Any
) -> None:
    alone = Model(name, *args, **kv)
    want = run(alone, getattr(alone, way), lambda _: None, steps)
    assert any(part.any() for part in want.kv)
    with rank_groups(size) as ranks:
        models = [Model(name, *args, **kv, group=rank.group) for rank in ranks]
        works = [
            functools.partial(run, model, getattr(model, way), rank.begin, steps)
            for model, rank in zip(models, ranks, strict=True)
        ]
        for rank, got in zip(ranks, together(works), strict=True):
            for rows, wanted in zip(got.rows, want.rows, strict=True):
                np.testing.assert_array_equal(rows, wanted)
            config = alone.decoder.config
            heads = DecoderShard(config, rank.group.shard).kv_heads(config.attentions[0])
            for kv_part, wanted in zip(got.kv, want.kv, strict=True):
                np.testing.assert_array_equal(kv_part, wanted[:, heads.start : heads.stop])


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        *itertools.product(golden.FIRST, ("float32", "bfloat16"), (2, 4)),
        *((name, "bfloat16", 2) for name in golden.NAMES if name not in golden.FIRST),
    ],
)
def test_every_architecture(name: str, dtype: str, size: int) -> None:
    assert_ranks_agree(name, size, dtype)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
@pytest.mark.parametrize("name", [*golden.FIRST, "glm4_moe-tiny", "gpt_oss-tiny", "deepseek_v3-tiny"])
def test_every_weight_format(name: str, quantization: str, size: int) -> None:
    assert_ranks_agree(name, size, "bfloat16", quantization)


@pytest.mark.parametrize("size", [2, 4])
def test_int8_kv(size: int) -> None:
    assert_ranks_agree("qwen3-tiny", size, "bfloat16", is_int8_kv=True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["qwen2-tiny", "ernie4_5_moe-tiny"])
def test_eager_execution(name: str, size: int) -> None:
    assert_ranks_agree(name, size, "bfloat16", way="eager", steps=STEPS[:4])


@pytest.mark.parametrize("level", library.available_isas())
@pytest.mark.parametrize("count", [1, 3])
def test_every_isa_level_and_number_of_threads(level: str, count: int) -> None:
    with isa(level), threads(count):
        assert_ranks_agree("qwen3_moe-tiny", 4, "bfloat16", steps=STEPS[:4])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", [None, "wint4"])
def test_biases(quantization: str | None, size: int, tmp_path: pathlib.Path) -> None:
    """Those of outputs that stay with a rank are cut; those of sums are added once, after the sum."""
    tensors, rng = rewrite.read("llama-tiny"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bias = rng.standard_normal(len(tensors[name]), np.float32)
        tensors[name.replace(".weight", ".bias")] = bias
    path = rewrite.write_folder(tmp_path / "model", "llama-tiny", {"attention_bias": True, "mlp_bias": True})
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    assert_ranks_agree(path, size, "bfloat16", quantization, steps=STEPS[:4])


@pytest.mark.parametrize("size", [2, 4])
def test_the_demo_model(size: int) -> None:
    """Its network is 896 wide, so that ranks have unequal parts of it."""
    assert_ranks_agree(ModelConfig(DEMO_MODEL).path, size, "bfloat16", "wint4", steps=STEPS[:4])
