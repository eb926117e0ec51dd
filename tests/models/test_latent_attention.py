"""Layers of latent attention: variants of config.json, checkpoints of e4m3, and what their KV cache keeps."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd import LLM
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub.gguf import checkpoint_folder
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.gguf.config import config_json
from fastdeploy_sd.models.gguf.container import GgufFile
from fastdeploy_sd.models.gguf.names import name_tensors
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.source import TensorInfo
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv, block_bytes
from tests.models import gguf_files, golden, quantized_files, rewrite
from tests.models.harness import SingleSequence
from tests.models.numpy_decoder import NumpyDecoder

pytestmark = pytest.mark.slow

NAME = "deepseek_v3-tiny"
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "n_shared_experts": 2,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": _YARN},
    "no latent query": {"q_lora_rank": None},
    "one group": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    "V2": {"q_lora_rank": None, "rope_parameters": _YARN | {"mscale": 0.7}, **_V2},
    "halves": {"rope_interleave": False},
}


def write(folder: pathlib.Path, variant: str) -> pathlib.Path:
    """The golden model with other keys, and tensors of random numbers where they have other shapes."""
    changes, tensors, rng = VARIANTS[variant], rewrite.read(NAME), np.random.default_rng(1)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    for i in range(3):
        if "q_lora_rank" in changes:
            for part in ("q_a_proj", "q_a_layernorm", "q_b_proj"):
                del tensors[f"model.layers.{i}.self_attn.{part}.weight"]
            tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = drawn(4 * 48, 128)
        if "n_shared_experts" in changes and i > 0:
            for part, shape in (("gate", (128, 128)), ("up", (128, 128)), ("down", (128, 128))):
                tensors[f"model.layers.{i}.mlp.shared_experts.{part}_proj.weight"] = drawn(*shape)
            del tensors[f"model.layers.{i}.mlp.gate.e_score_correction_bias"]
    path = rewrite.write_folder(folder / "model", NAME, changes)
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_compute_what_is_published(variant: str, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, variant)
    token_ids = golden.cases(NAME)[-1].prompt
    want = NumpyDecoder(path, "float32", "float32").logits(token_ids)[-1]
    got = SingleSequence(path, "float32").logits(token_ids)[-1]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3)
    other = SingleSequence(golden.ROOT / NAME, "float32").logits(token_ids)[-1]
    assert np.abs(got - other).max() > 0.05  # the key matters


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_e4m3_stands_for_its_numbers(kind: str, tmp_path: pathlib.Path) -> None:
    """Also of the matrix that is cut at heads, across its blocks."""
    path, plain = quantized_files.write(tmp_path, NAME, quantized_files.float8(kind, {}))
    tokens = np.arange(3, 40, dtype=np.int32)
    got, want = (SingleSequence(model, "float32").logits(tokens) for model in (path, plain))
    np.testing.assert_array_equal(got, want)


def test_codes_that_stay_do_so_besides_the_products_by_heads(tmp_path: pathlib.Path) -> None:
    path, plain = quantized_files.write(tmp_path, NAME, quantized_files.float8("block", {}))
    tokens = np.arange(3, 20, dtype=np.int32)
    kept, numbers = SingleSequence(path, "bfloat16", keeps_integers=True), SingleSequence(plain, "bfloat16")
    assert kept.num_packed_bytes < numbers.num_packed_bytes
    got, want = kept.logits(tokens), numbers.logits(tokens)
    assert 0 < np.sqrt(np.mean((got - want) ** 2)) < 0.05 * np.std(want)


def test_the_cache_has_one_vector_per_token_and_no_values() -> None:
    layers = LayerKv.of_decoder(read_decoder_config(Checkpoint(golden.ROOT / NAME).config))
    assert layers == [LayerKv(1, 48, has_values=False)] * 3
    fmt = KvCacheFormat.create(Config(ModelConfig(model=NAME)))
    assert block_bytes(layers, fmt) == 3 * fmt.block_size * 48 * 2


def test_a_cache_of_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: expected auto, as layers keep latent vectors .*, got int8"):
        LLM(model=str(golden.ROOT / NAME), kv_cache_dtype="int8")


@pytest.mark.parametrize("variant", ["V2", "no latent query", "one group"])
def test_a_gguf_file_is_the_model_it_was_made_of(
    variant: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With YaRN and both routers: llama.cpp's names, keys and values apart and head by head."""
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))
    path = write(tmp_path, variant)
    folder = checkpoint_folder([gguf_files.write(tmp_path / "m.gguf", str(path), "F32")])
    tokens = golden.cases(NAME)[3].prompt
    got, want = (SingleSequence(model, "float32").logits(tokens) for model in (folder, path))
    np.testing.assert_array_equal(got, want)


def test_gguf_files_of_before_may_have_one_matrix_and_no_groups(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are then as long as they are made; with as many experts as DeepSeek-V3 the groups are as published."""
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))
    values: dict[str, object] = {
        "attention.key_length": 192, "attention.value_length": 128, "attention.kv_lora_rank": 512, "expert_count": 256,
        "expert_used_count": 8, "rope.dimension_count": 64, "expert_gating_func": 2, "attention.head_count": 128,
        "attention.head_count_kv": 128, "embedding_length": 7168, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": float(np.float32(0.1)),
    }  # fmt: skip
    file = GgufFile(gguf_files.write(tmp_path / "m.gguf", NAME, "F32"))
    metadata = {f"deepseek2.{key}": value for key, value in values.items()} | {"general.architecture": "deepseek2"}
    monkeypatch.setattr(file, "metadata", metadata)
    found = config_json(file)
    wanted = {"qk_nope_head_dim": 128, "v_head_dim": 128, "qk_rope_head_dim": 64, "n_group": 8, "topk_group": 4}
    assert {key: found[key] for key in wanted} == wanted
    assert (found["rope_scaling"]["mscale"], found["rope_scaling"]["mscale_all_dim"]) == (1.0, 1.0)
    assert "partial_rotary_factor" not in found
    names = {"blk.3.attn_kv_b.weight": TensorInfo(file.path, "F32", (32768, 512), 0, 0)}
    [named] = name_tensors(names, "deepseek2", 128, 128)
    assert (named.name, named.entry.shape) == ("model.layers.3.self_attn.kv_b_proj.weight", (32768, 512))
