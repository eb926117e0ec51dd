"""The keys of config.json that are read, of all families, with their types and bounds."""

from __future__ import annotations

from collections.abc import Mapping

from fastdeploy_sd.models.attention_config import MAX_CONV_WIDTH, MAX_DELTA_DIM, MAX_HEAD_DIM, MAX_LATENT_DIM
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, Integer, Number
from fastdeploy_sd.models.rope_config import THETA

MAX_EXPERTS, MAX_GROUPS = 65_536, 32


def integer_fields(low: int, high: int, *names: str) -> dict[str, Integer]:
    return dict.fromkeys(names, Integer(low, high))


GRANITE_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
# Every key that is read, of all families. Bounds are far beyond any model, and small enough to count up to.
FIELDS: Mapping[str, Field] = {
    **integer_fields(1, MAX_I32, "vocab_size"),
    **integer_fields(1, 1 << 24, "hidden_size", "intermediate_size", "moe_intermediate_size"),
    **integer_fields(1, 10_000, "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "head_dim": Integer(1, MAX_HEAD_DIM),
    "max_position_embeddings": Integer(2, MAX_I32),
    "rms_norm_eps": Number(1e-30, 1),
    "rope_theta": THETA,
    "tie_word_embeddings": Boolean(),
    "attention_bias": Boolean(),
    "mlp_bias": Boolean(),
    "use_bias": Boolean(),
    **integer_fields(1, MAX_I32, "sliding_window"),
    "use_sliding_window": Boolean(),
    "max_window_layers": Integer(0, 10_000, 28),
    # Qwen3
    "num_experts": Integer(0, MAX_EXPERTS),
    "num_local_experts": Integer(0, MAX_EXPERTS, 0),
    "num_experts_per_tok": Integer(1, MAX_EXPERTS),
    "norm_topk_prob": Boolean(),
    "decoder_sparse_step": Integer(0, 10_000, 1),
    # ERNIE 4.5
    "moe_num_experts": Integer(1, MAX_EXPERTS),
    "moe_k": Integer(1, MAX_EXPERTS),
    "moe_num_shared_experts": Integer(0, MAX_EXPERTS, 0),
    "moe_layer_interval": Integer(1, 10_000, 1),
    "moe_norm_min": Number(0, 1, 1e-12),
    "moe_use_aux_free": Boolean(default=True),
    "moe_norm_gate_logits": Boolean(default=True),
    # DeepSeek's router, as GLM has it
    **integer_fields(1, MAX_EXPERTS, "n_routed_experts"),
    "n_shared_experts": Integer(0, MAX_EXPERTS, 1),
    **dict.fromkeys(("n_group", "topk_group"), Integer(1, MAX_GROUPS, 1)),
    "routed_scaling_factor": Number(1e-6, 1e6, 1.0),
    "first_k_dense_replace": Integer(0, 10_000, 1),
    "use_qk_norm": Boolean(),
    # DeepSeek's attention
    **integer_fields(1, 1 << 24, "q_lora_rank"),
    **integer_fields(1, MAX_LATENT_DIM, "kv_lora_rank", "qk_rope_head_dim"),
    **integer_fields(1, 10_000, "qk_nope_head_dim", "v_head_dim"),
    "rope_interleave": Boolean(default=True),
    # Qwen3-Next, Qwen3.5
    **integer_fields(1, 1024, "linear_num_key_heads", "linear_num_value_heads"),
    **integer_fields(1, MAX_DELTA_DIM, "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim": Integer(2, MAX_CONV_WIDTH, 4),
    "full_attention_interval": Integer(1, 10_000, 4),
    "shared_expert_intermediate_size": Integer(1, 1 << 24),
    # gpt-oss
    "swiglu_limit": Number(1e-3, 1e6),
    # Several families
    "partial_rotary_factor": Number(0, 1, 1.0),
    # SmolLM3
    "no_rope_layer_interval": Integer(1, 10_000, 4),
    # Gemma
    "query_pre_attn_scalar": Number(1, 1e6, 256.0),
    "sliding_window_pattern": Integer(1, 10_000),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Number(1e-3, 1e6)),
    "rope_local_base_freq": THETA,
    "rms_norm_offset": Number(0, 1, 1.0),
    # Granite
    **dict.fromkeys(GRANITE_MULTIPLIERS, Number(1e-6, 1e6, 1.0)),
}
