"""config.json of models with latent attention: published ones are read whole, and what cannot be is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.attention_config import LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, MoeConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.rope_table import YarnScaling

pytestmark = pytest.mark.slow

_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
# deepseek-ai/DeepSeek-V3, R1 and V3.1: the same keys and values.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": _YARN, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
# moonshotai/Kimi-K2-Instruct: where it differs.
KIMI_K2 = V3 | {
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "max_position_embeddings": 131072, "rope_theta": 50000.0, "vocab_size": 163840,
    "rope_scaling": _YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}, "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
# deepseek-ai/DeepSeek-V2-Lite: likewise.
V2_LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "q_lora_rank": None,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_method": "greedy", "vocab_size": 102400,
}  # fmt: skip


def attention_of(config: DecoderConfig) -> LatentAttentionConfig:
    [attention] = {layer.attention for layer in config.layers}
    assert isinstance(attention, LatentAttentionConfig)
    return attention


def num_dense(config: DecoderConfig) -> int:
    kinds = [type(layer.mlp) for layer in config.layers]
    count = kinds.count(DenseConfig)
    assert kinds == [DenseConfig] * count + [MoeConfig] * (config.num_layers - count)
    return count


def test_deepseek_v3_is_read() -> None:
    config = read_decoder_config(V3)
    a, moe = attention_of(config), config.moe
    assert (config.hidden_size, config.num_layers, num_dense(config), config.max_position) == (7168, 61, 3, 163840)
    assert (a.num_heads, a.num_kv_heads, a.head_dim, a.query_dim, a.q_size) == (128, 1, 576, 192, 128 * 128)
    assert (a.key_dim, a.value_dim, a.latent_dim, a.query_latent_dim) == (128, 128, 512, 1536)
    assert a.rope.scaling == YarnScaling(40.0, 4096, 1.0, 32.0, 1.0)
    assert (a.rope.theta, a.rope.rotary_dim, a.rope.interleaved) == (10000.0, 64, True)
    assert a.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12)
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.num_chosen_groups) == (256, 8, 8, 4)
    assert (moe.intermediate_size, moe.shared_intermediate_size, moe.scale) == (2048, 2048, 2.5)
    assert (moe.sigmoid, moe.selection_bias, moe.normalize) == (True, True, True)


def test_kimi_k2_is_read() -> None:
    config = read_decoder_config(KIMI_K2)
    moe = config.moe
    assert moe is not None
    assert (num_dense(config), attention_of(config).num_heads, config.max_position) == (1, 64, 131072)
    assert (moe.num_experts, moe.num_groups, moe.scale) == (384, 1, 2.827)


def test_deepseek_v2_lite_is_read() -> None:
    config = read_decoder_config(V2_LITE)
    a, moe = attention_of(config), config.moe
    assert moe is not None
    assert (num_dense(config), a.query_latent_dim) == (1, None)
    assert (moe.sigmoid, moe.selection_bias, moe.normalize, moe.num_groups) == (False, False, False, 1)
    assert (moe.top_k, moe.shared_intermediate_size) == (6, 2 * 1408)
    scaling = a.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.amplitude == 1.0
    assert a.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, rel=1e-12)


def test_scores_have_no_factor_without_yarn_or_its_weight() -> None:
    plain = {key: value for key, value in _YARN.items() if key != "mscale_all_dim"}
    for scaling in (None, plain):
        assert attention_of(read_decoder_config(V3 | {"rope_scaling": scaling})).scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_lora_rank": 1024}, r"kv_lora_rank: expected an integer from 1 to 640, got 1024"),
        ({"kv_lora_rank": 600}, r"kv_lora_rank: expected a multiple of 16 up to 640 together with qk_rope.*, got 600"),
        ({"kv_lora_rank": 511}, r"kv_lora_rank: expected a multiple of 16 .*, got 511"),
        ({"kv_lora_rank": None}, r"kv_lora_rank: expected an integer from 1 to 640, got nothing"),
        ({"qk_rope_head_dim": 63}, r"qk_rope_head_dim: expected an even number, got 63"),
        ({"num_attention_heads": 512}, r"num_attention_heads: expected at most 256, .*, got 512"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads: expected as many as num_attention_heads .128., got 8"),
        ({"attention_bias": True}, r"attention_bias: expected false .*, got true"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq: expected 1 .*, got 2"),
        ({"topk_method": "group_limited_greedy"}, r"topk_method: expected 'noaux_tc' .*, got 'group_limited_greedy'"),
        ({"v_head_dim": 0}, r"v_head_dim: expected an integer from 1 to 10000, got 0"),
        ({"q_lora_rank": 0}, r"q_lora_rank: expected an integer from 1 to .*, got 0"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {message}"):
        read_decoder_config(V3 | values)


def test_deepseek_v2_s_groups_and_normalised_weights_are_refused() -> None:
    for key, value in (("topk_method", "group_limited_greedy"), ("norm_topk_prob", True), ("scoring_func", "sigmoid")):
        with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: expected "):
            read_decoder_config(V2_LITE | {key: value})
