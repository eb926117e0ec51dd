"""Every key of published releases is understood, or refused by its name; no weights are needed."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint import read_config
from fastdeploy_sd.models.checkpoint.quantization import read_storages
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.rope_config import RopeConfig
from fastdeploy_sd.ops.rope_table import YarnScaling
from tests.models.published_configs import GLM, GPT_OSS, REFUSED, SERVED

pytestmark = pytest.mark.slow


def read(folder: pathlib.Path, values: dict[str, object]) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_decoder_config(read_config(folder))


def expert_layers(config: DecoderConfig) -> list[int]:
    return [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoeConfig)]


@pytest.mark.parametrize("release", SERVED)
def test_a_release_is_read_from_its_config_alone(tmp_path: pathlib.Path, release: str) -> None:
    values = SERVED[release]
    config = read(tmp_path, values)
    assert (config.vocab_size, config.max_position) == (103424, 131072)
    attention = config.attentions[0]
    assert isinstance(attention, AttentionConfig)
    assert (attention.head_dim, config.norm_eps) == (128, 1e-5)
    assert attention.rope == RopeConfig(500000.0, 128, interleaved=True)
    assert not any((attention.qkv_bias, attention.output_bias, config.dense.bias, attention.qk_norm))
    assert config.tie_word_embeddings == (not release.startswith("300B"))
    assert (config.num_layers, config.hidden_size) == (values["num_hidden_layers"], values["hidden_size"])
    assert (attention.num_heads, attention.num_kv_heads) == (
        values["num_attention_heads"],
        values["num_key_value_heads"],
    )
    if release.startswith("0.3B"):
        assert config.moe is None
        return
    large = release.startswith("300B")
    assert config.moe is not None
    assert expert_layers(config) == list(range(3, 54) if large else range(1, 28))
    assert (config.moe.num_experts, config.moe.top_k) == (64, 8 if large else 6)
    assert (config.moe.intermediate_size, config.moe.shared_intermediate_size) == ((3584, 0) if large else (1536, 3072))
    assert (config.moe.normalize, config.moe.norm_min, config.moe.selection_bias) == (True, 1e-12, True)


@pytest.mark.parametrize("release", GLM)
def test_a_release_of_glm_is_read(tmp_path: pathlib.Path, release: str) -> None:
    values, is_air = GLM[release], "Air" in release
    config = read(tmp_path, values)
    attention, moe = config.layers[-1].attention, config.moe
    assert isinstance(attention, AttentionConfig)
    assert (config.vocab_size, config.max_position) == (151552, values["max_position_embeddings"])
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (96, 8, 128)
    assert (attention.qkv_bias, attention.output_bias, attention.qk_norm) == (True, False, not is_air)
    assert attention.rope == RopeConfig(1e6, 64)
    assert moe is not None
    assert expert_layers(config) == list(range(1, 46) if is_air else range(3, 92))
    assert (moe.num_experts, moe.top_k, moe.scale) == ((128, 8, 1.0) if is_air else (160, 8, 2.5))
    assert moe.intermediate_size == moe.shared_intermediate_size == (1408 if is_air else 1536)
    assert (moe.sigmoid, moe.selection_bias, moe.normalize) == (True, True, True)
    names = [storage.name for storage in read_storages(tmp_path, values)]
    assert names == (["compressed-tensors, with a scale per group, output or tensor"] if "FP8" in release else [])


@pytest.mark.parametrize("release", GPT_OSS)
def test_a_release_of_gpt_oss_is_read(tmp_path: pathlib.Path, release: str) -> None:
    config = read(tmp_path, GPT_OSS[release])
    num_experts = 32 if release == "gpt-oss-20b" else 128
    moe = config.moe
    assert moe is not None
    assert (config.num_layers, config.vocab_size, config.max_position) == (
        36 if num_experts == 128 else 24,
        201088,
        131072,
    )
    assert [own.window for own in config.attentions] == [128, None] * (config.num_layers // 2)
    attentions = [layer.attention for layer in config.layers]
    assert all(isinstance(own, AttentionConfig) and own.sinks and own.output_bias for own in attentions)
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (num_experts, 4, 2880)
    assert (moe.biases, moe.gate_limit, moe.normalize, moe.sigmoid) == (True, 7.0, True, False)
    [storage] = read_storages(tmp_path, GPT_OSS[release])
    assert storage.name == "MXFP4 of stacked experts"
    rope = config.attentions[0].rope
    assert rope is not None
    scaling = rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.truncate) == (32.0, False)
    assert expert_layers(config) == list(range(config.num_layers))


@pytest.mark.parametrize("release", REFUSED)
def test_what_is_not_served_is_refused_by_its_key(tmp_path: pathlib.Path, release: str) -> None:
    values, message = REFUSED[release]
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, values)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "rope_theta", "head_dim"])
def test_a_key_that_a_release_leaves_out_has_the_published_code_s_value(tmp_path: pathlib.Path, key: str) -> None:
    values = SERVED["0.3B-PT"]
    assert read(tmp_path, {k: v for k, v in values.items() if k != key}) == read(tmp_path, values)


@pytest.mark.parametrize("kind", ["moe_layer_start_index", "moe_layer_end_index"])
def test_layers_with_experts_may_be_given_for_two_kinds_of_experts(tmp_path: pathlib.Path, kind: str) -> None:
    """As releases for text and pictures do: one number for each."""
    config = read(tmp_path, SERVED["21B-A3B-PT"] | {kind: [5, 9]})
    assert config.moe is not None
    assert expert_layers(config) == list(range(5, 28) if "start" in kind else range(1, 10))


def test_another_architecture_is_refused_without_a_nearest_name() -> None:
    for name in ("Gemma3ForConditionalGeneration", "DeepseekV32ForCausalLM", "Mistral3ForConditionalGeneration"):
        with pytest.raises(CheckpointError, match=re.escape(f"got ['{name}']")) as raised:
            read_decoder_config({"architectures": [name]})
        assert "did you mean" not in raised.value.message
