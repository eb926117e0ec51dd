"""Every key of the published ERNIE 4.5 releases is understood, or refused by its name; no weights are needed."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint import read_config
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.rope_config import RopeConfig
from tests.models.published_configs import REFUSED, SERVED

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
    attention = config.layers[0].attention
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
