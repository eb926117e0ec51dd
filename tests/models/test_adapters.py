"""Rows with low-rank adapters: what merged weights compute, in any batch, on any number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.adapted_linears import adapter_bytes
from fastdeploy_sd.models.adapters import Adapters
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.types import I32
from tests.models import gguf_files, rewrite
from tests.models.harness import SingleSequence
from tests.models.peft_adapters import ALL, ATTENTION, DENSE, write_adapter, write_merged
from tests.models.ranks import Rank, rank_groups, together

MAX_RANK = 8
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
Options = dict[str, Any]
# Model -> targets, further options: fused matrices, biases, parts of other ranks or without an adapter, mixed experts.
MODELS: dict[str, tuple[tuple[str, ...], Options]] = {
    "llama-tiny": (ALL, {"rank_pattern": {"k_proj": 7, "layers.1.mlp.up_proj": 1}, "alpha_pattern": {"v_proj": 5}}),
    "qwen2-tiny": (("q_proj", "v_proj", "down_proj"), {"use_rslora": True}),
    "gemma3-tiny": (ALL, {}),
    "ernie4_5_moe-tiny": (ATTENTION, {}),
    "deepseek_v3-tiny": (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *DENSE), {}),
    "glm4_moe-tiny": (ALL, {}),
    "qwen3_next-tiny": (("in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate", *ALL), {}),
    "qwen3_5_moe-tiny": ((*DELTA_NET, "shared_expert_gate", *ALL), {}),
    "phi3-tiny": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {}),
}


def tokens(num_tokens: int, seed: int = 0) -> I32:
    return np.random.default_rng(seed).integers(4, 4000, num_tokens).astype(np.int32)


def model_with(
    model: str | Path, *folders: Path, dtype: str = "float32", group: TpGroup = ALONE
) -> tuple[SingleSequence, Adapters]:
    """A model with an adapter in each slot but for the first, which stays empty."""
    adapters = Adapters(len(folders) + 1, MAX_RANK, dtype)
    own = SingleSequence(model, dtype, group=group, adapters=adapters)
    for slot, folder in enumerate(folders):
        adapters.fill(slot + 1, adapters.read(folder))
    return own, adapters


@pytest.mark.parametrize("name", MODELS)
def test_rows_compute_what_merged_weights_do(name: str, tmp_path: Path) -> None:
    targets, config = MODELS[name]
    folder = write_adapter(tmp_path / "adapter", name, targets, **config)
    own, _ = model_with(name, folder)
    merged = SingleSequence(write_merged(tmp_path / "merged", name, folder), "float32")
    want, base = merged.logits(tokens(40)), own.logits(tokens(40))
    np.testing.assert_allclose(own.batch_logits([tokens(40)], [1]), want, rtol=1e-3, atol=1e-3)
    assert np.abs(want - base).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama-tiny", "phi3-tiny", "ernie4_5_moe-tiny", "deepseek_v3-tiny", "qwen3_next-tiny", "qwen3_5_moe-tiny"]
)
def test_a_sequence_has_the_same_bits_in_any_company(name: str, dtype: str, tmp_path: Path) -> None:
    """Also the base's: without slots, in slot -1, and in one that was emptied."""
    targets = MODELS[name][0]
    folders = [write_adapter(tmp_path / f"{seed}", name, targets, seed=seed, rank=seed + 3) for seed in range(2)]
    own, adapters = model_with(name, *folders, dtype=dtype)
    sequences, slots = [tokens(n, seed=n) for n in (1, 37, 3, 70, 1, 2)], [1, 2, -1, 1, 2, 0]
    alone = [own.batch_logits([s], [slot]) for s, slot in zip(sequences, slots, strict=True)]
    np.testing.assert_array_equal(own.batch_logits(sequences, slots), np.concatenate(alone))
    np.testing.assert_array_equal(alone[2], own.logits(sequences[2]))
    np.testing.assert_array_equal(alone[5], own.logits(sequences[5]))
    assert not np.array_equal(alone[0], own.logits(sequences[0]))
    adapters.clear(1)
    np.testing.assert_array_equal(own.batch_logits(sequences[:1], [1]), own.logits(sequences[0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-tiny", 2),
        ("llama-tiny", 4),
        ("phi3-tiny", 2),
        ("deepseek_v3-tiny", 2),
        ("qwen3_next-tiny", 4),
        ("qwen3_5_moe-tiny", 2),
    ],
)
def test_ranks_compute_the_bits_of_one(name: str, size: int, dtype: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, name, MODELS[name][0])
    sequences, slots = [tokens(5), tokens(30, 1)], [1, -1]
    want = model_with(name, folder, dtype=dtype)[0].batch_logits(sequences, slots)

    def run(model: SingleSequence, rank: Rank) -> np.ndarray:
        rank.begin(1)
        return model.batch_logits(sequences, slots)

    with rank_groups(size) as ranks:
        models = [model_with(name, folder, dtype=dtype, group=rank.group)[0] for rank in ranks]
        for got in together([functools.partial(run, *pair) for pair in zip(models, ranks, strict=True)]):
            np.testing.assert_array_equal(got, want)


def test_an_adapter_fits_a_gguf_of_its_model(tmp_path: Path) -> None:
    """Whose file has the rows of q and k in another order."""
    folder = write_adapter(tmp_path / "adapter", "llama-tiny")
    base = rewrite.write_folder(tmp_path / "gguf", "llama-tiny")
    gguf_files.write(base / "model.gguf", "llama-tiny", "F32")
    got, want = (model_with(model, folder)[0].batch_logits([tokens(20)], [1]) for model in (base, "llama-tiny"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [1, 2])
def test_the_memory_is_as_foreseen(size: int) -> None:
    with rank_groups(size) as ranks:
        for rank in ranks:
            own, adapters = model_with("phi3-tiny", dtype="bfloat16", group=rank.group)
            options = config_from_kwargs(model="demo", dtype="bfloat16", enable_lora=True, max_lora_rank=MAX_RANK)
            assert adapters.num_bytes == adapter_bytes(options, own.config, rank.group.shard)


def test_the_digest_is_of_numbers_and_scale(tmp_path: Path) -> None:
    options: list[Options] = [
        {},
        {"seed": 1},
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}},
    ]
    _, adapters = model_with("llama-tiny")
    digests = [
        adapters.digest(write_adapter(tmp_path / f"{i}", "llama-tiny", ("q_proj",), **option))
        for i, option in enumerate([*options, {"peft_version": "0.1"}])
    ]
    assert len(set(digests)) == len(options)
    assert digests[-1] == digests[0]
    assert all(len(bytes.fromhex(digest)) == 16 for digest in digests)


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _adapted(module: str, a: tuple[int, int], b: tuple[int, int]) -> Options:
    """A module's matrices besides those of the adapter."""
    names = (f"base_model.model.model.{module}.lora_{matrix}.weight" for matrix in "AB")
    return {"change": {name: _matrix(*shape) for name, shape in zip(names, (a, b), strict=True)}}


def _matrix(rows: int, columns: int, value: float = 0.0) -> np.ndarray:
    return np.full((rows, columns), value, np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "adapter_config.json: use_dora: expected false"),
        ({"bias": "all"}, "bias: expected 'none' \\(nothing else is supported\\), got 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: expected"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: expected true or false or 'gaussian'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: expected no such key"),
        ({"peft_type": "LOHA"}, "peft_type: expected 'LORA'"),
        ({"lora_alpha": None}, "lora_alpha: expected a number from 0"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern: expected names of modules as keys"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern: 'q_proj': expected a number above 0, got 0"),
        ({"r": 5}, r"layers.0.self_attn.q_proj: expected rank 5, .* got lora_A\[4, 128\] and lora_B\[128, 4\]"),
        ({"rank": 9}, r"expected a rank of at most max_lora_rank, 8, got 9"),
        ({"target_modules": ["q_proj", "k_proj"]}, "'k_proj': expected its tensors"),
        ({"change": {f"{_Q}.lora_A.weight": _matrix(4, 64)}}, "expected 128 outputs of 128 inputs, .* of 64 inputs"),
        ({"change": {f"{_Q}.lora_A.weight": _matrix(4, 128, np.nan)}}, "layers.0.self_attn.q_proj: expected finite"),
        ({"change": {f"{_Q}.lora_B.weight": np.zeros((128, 4), np.int64)}}, r"expected a matrix of F32, F16 or BF16"),
        ({"change": {f"{_Q}.lora_magnitude_vector": _matrix(1, 1)}}, "expected lora_A.weight and lora_B.weight"),
        ({"change": {"base_model.model.lm_head.lora_A.weight": _matrix(4, 128)}}, "lm_head.lora_A.weight: expected"),
        (
            {"change": {f"{_Q.replace('0', '7')}.lora_A.weight": _matrix(4, 128)}},
            "expected lora_A and lora_B, got lora_A",
        ),
        (
            _adapted("layers.7.self_attn.q_proj", (4, 9), (9, 4)),
            r"layers.7.self_attn.q_proj: expected modules of the model .*mlp.down_proj, .*v_proj of its layers",
        ),
        (
            _adapted("layers.0.self_attn.qkv_proj", (4, 128), (384, 4)),
            r"expected qkv_proj or its parts, got layers.0.self_attn.q_proj, layers.0.self_attn.qkv_proj",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused_by_name(options: Options, message: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, "llama-tiny", ("q_proj",), **options)
    _, adapters = model_with("llama-tiny")
    with pytest.raises(CheckpointError, match=message):
        adapters.digest(folder)
    with pytest.raises(CheckpointError, match=message):
        adapters.read(folder)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        ("self_attn.kv_b_proj", (256, 32), "kv_b_proj: expected no adapter of it, as attention multiplies queries"),
        ("mlp.experts.0.up_proj", (64, 128), "experts.0.up_proj: expected no adapter of it, as experts that tokens"),
        ("mlp.gate", (8, 128), "layers.1.mlp.gate: expected modules of the model that adapters can change"),
        ("self_attn.kv_a_proj_with_mqa", (32, 128), "expected 48 outputs of 128 inputs, .* got 32"),
    ],
)
def test_what_adapters_cannot_change_is_refused_by_name(
    module: str, shape: tuple[int, int], message: str, tmp_path: Path
) -> None:
    model, (outputs, inputs) = "deepseek_v3-tiny", shape
    _, adapters = model_with(model)
    folder = write_adapter(tmp_path, model, ("o_proj",), **_adapted(f"layers.1.{module}", (4, inputs), (outputs, 4)))
    with pytest.raises(CheckpointError, match=message):
        adapters.digest(folder)


def test_missing_and_pickled_files_are_refused(tmp_path: Path) -> None:
    adapters = Adapters(1, 4, "float32")
    with pytest.raises(CheckpointError, match="expected the folder of an adapter, got"):
        adapters.digest(tmp_path / "none")
    folder = write_adapter(tmp_path, "llama-tiny", ("q_proj",))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"got adapter_model\.bin, a pickle"):
        adapters.digest(folder)
