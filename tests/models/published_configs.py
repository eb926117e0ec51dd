"""config.json of published releases of ERNIE 4.5, GLM and gpt-oss: their keys and values, written down as facts.

`-PT` releases are in Hugging Face's layout, `-Paddle` ones in Paddle's, whose files keep more of the training.
Sources: the releases of `baidu` on Hugging Face; PaddlePaddle/ERNIE (its converter of releases and its configurations
for training); PaddlePaddle/FastDeploy (documents and tests, for quantised releases); PaddleFormers and transformers
(configuration classes, for keys and defaults).
"""

from __future__ import annotations

from typing import Any

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON: dict[str, Any] = _SPECIAL | {
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "use_cache": False,
    "vocab_size": 103424, "rope_theta": 500000, "use_bias": False,
}  # fmt: skip
_AUTO_MAP = {"AutoConfig": "configuration_ernie4_5.Ernie4_5_Config", "AutoModel": "modeling_ernie4_5.Ernie4_5_Model"}
_03B: dict[str, Any] = _COMMON | {
    "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 18,
    "tie_word_embeddings": True,
}  # fmt: skip
_MOE: dict[str, Any] = _COMMON | {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 64,
    "moe_layer_interval": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
_21B: dict[str, Any] = _MOE | {
    "hidden_size": 2560, "intermediate_size": 12288, "num_attention_heads": 20, "num_key_value_heads": 4,
    "num_hidden_layers": 28, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 1536,
    "moe_k": 6, "tie_word_embeddings": True,
}  # fmt: skip
_300B: dict[str, Any] = _MOE | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "num_hidden_layers": 54, "moe_num_shared_experts": 0, "moe_layer_start_index": 3, "moe_intermediate_size": 3584,
    "moe_k": 8, "tie_word_embeddings": False,
}  # fmt: skip
# How the router spread tokens while training; Paddle's releases and those for thinking keep it.
_ROUTING = {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True}
_PADDLE = {"dtype": "bfloat16", "use_rmsnorm": True}
_PT = {"torch_dtype": "bfloat16", "auto_map": _AUTO_MAP}
# What transformers 5 writes of the same models.
_TRANSFORMERS = {
    "dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "moe_norm_min": 1e-12,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "initializer_range": 0.02,
    "transformers_version": "5.0.0", "moe_layer_end_index": 27,
}  # fmt: skip
# What Baidu's training writes, and its converter to PyTorch's layout takes out.
_TRAINING = {
    "add_tail_layers": False, "compression_ratio": 1.0, "fuse_gate_detach_matmul": True, "fuse_linear": False,
    "fuse_ln": False, "fuse_rms_norm": True, "fuse_rope": False, "fuse_swiglu": True, "global_aux_loss": False,
    "moe_aux_loss_lambda": 1e-05, "moe_group_orthogonal_loss": True, "moe_orthogonal_loss_lambda": 0.0,
    "moe_z_loss_lambda": 0.0, "use_fast_ln": True, "use_flash_attention": True, "max_sequence_length": 4096,
    "model_name": "ernie", "paddlenlp_version": None, "multi_token_pred_lambda": 0.1, "weight_share_add_bias": True,
    "scale_qk_coeff": 1.0, "moe_gate_act": "softmax", "moe_group_experts": False, "moe_norm_gate_logits": True,
    "moe_use_hard_gate": False, "sinkhorn_2gate": True, "rope_reorder": False, "is_quantized": False,
    "rope_scaling": None, "quantization_config": {"quant_method": None, "weight_quantize_algo": None, "shift": False},
}  # fmt: skip

SERVED: dict[str, dict[str, Any]] = {
    "0.3B-Base-PT": _03B | _PT,
    "0.3B-PT": _03B | _PT | {"architectures": ["Ernie4_5ForCausalLM"]},
    "0.3B-Paddle": _03B | _PADDLE,
    "21B-A3B-Base-PT": _21B | _PT,
    "21B-A3B-PT": _21B | _PT,
    "21B-A3B-Thinking": _21B | _PT | _ROUTING,
    "21B-A3B-Paddle": _21B | _PADDLE | _ROUTING,
    "21B-A3B of transformers": {k: v for k, v in _21B.items() if k != "rope_theta"} | _TRANSFORMERS,
    "21B-A3B of Baidu's training": _21B | _PADDLE | _ROUTING | _TRAINING,
    "300B-A47B-Base-PT": _300B | _PT,
    "300B-A47B-Paddle": _300B | _PADDLE | _ROUTING,
}
# Release -> (config.json, what the refusal says).
_VL = {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "moe_num_experts": [64, 64]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "VL-28B-A3B-Paddle": (_21B | _VL, "architectures: expected one of .*got .'Ernie4_5_VLMoeForConditional"),
    "text part of VL": (_21B | {"moe_num_experts": [64, 64]}, r"moe_num_experts: .*got \[64, 64\]"),
    "300B-A47B-W4A8C8-TP4-Paddle": (
        _300B | _PADDLE | {"quantization_config": {
            "dense_quant_type": "wint8", "moe_quant_type": "w4a8", "kv_cache_quant_type": "int8",
            "quantization": "mix_quant", "is_quantized": True,
        }}, "quantization_config: this checkpoint is w4a8",
    ),
    "300B-A47B-2Bits-Paddle": (
        _300B | _PADDLE | {"quantization_config": {
            "dense_quant_type": "wint8", "moe_quant_type": "w4w2", "quantization": "wint2",
            "moe_quant_config": {"moe_w4_quant_config": {"quant_type": "wint4"}},
        }}, "quantization_config: this checkpoint is wint2",
    ),
    "300B-A47B-FP8-Paddle": (
        _300B | _PADDLE | {"quantization_config": {
            "dense_quant_type": "tensor_wise_fp8", "moe_quant_type": "tensor_wise_fp8", "quantization": "mix_quant",
            "kv_cache_quant_type": "float8_e4m3", "is_quantized": True,
        }}, "quantization_config: this checkpoint is tensor_wise_fp8",
    ),
    "a sigmoid router": (_21B | {"moe_gate_act": "sigmoid"}, "moe_gate_act: expected 'softmax' .*got 'sigmoid'"),
    "compressed positions": (_03B | {"compression_ratio": 4.0}, r"compression_ratio: expected 1\.0 .*got 4\.0"),
    "layer norms": (_03B | {"use_rmsnorm": False}, "use_rmsnorm: expected true .*got false"),
    "biases of experts": (_21B | {"use_bias": True}, "use_bias: expected false .*got true"),
    "experts of a dense one": (_03B | {"moe_num_experts": 64}, r"moe_num_experts: expected 0 .*got 64"),
}  # fmt: skip

# Sources: the releases of `zai-org` and `openai` on Hugging Face; transformers (configuration classes).
_GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "head_dim": 128, "hidden_act": "silu",
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "hidden_size": 5120, "intermediate_size": 12288,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "num_hidden_layers": 92, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": True, "vocab_size": 151552, "transformers_version": "4.54.0",
}  # fmt: skip
_GLM_AIR: dict[str, Any] = _GLM | {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "num_hidden_layers": 46, "use_qk_norm": False,
}  # fmt: skip
_GLM_46 = _GLM | {"max_position_embeddings": 202752}
_OBSERVED: dict[str, Any] = {
    "actorder": None, "block_structure": None, "group_size": None, "num_bits": 8, "symmetric": True, "type": "float",
}  # fmt: skip


def _float8(num_layers: int) -> dict[str, Any]:
    """Float8 per channel, inputs per token; routers, embeddings and the head stay bfloat16."""
    inputs = _OBSERVED | {"dynamic": True, "observer": None, "observer_kwargs": {}, "strategy": "token"}
    weights = _OBSERVED | {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "strategy": "channel"}
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    ignored = [f"model.layers.{i}.mlp.gate" for i in range(num_layers)]
    return {
        "quantization_config": {
            "config_groups": {"group_0": group}, "format": "float-quantized", "global_compression_ratio": None,
            "ignore": ["lm_head", *ignored, f"model.layers.{num_layers}.eh_proj"], "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
            "transform_config": {}, "version": "0.10.3.dev47",
        }
    }  # fmt: skip


GLM: dict[str, dict[str, Any]] = {
    "GLM-4.5": _GLM,
    "GLM-4.5-FP8": _GLM | _float8(92),
    "GLM-4.5-Air": _GLM_AIR,
    "GLM-4.5-Air-FP8": _GLM_AIR | _float8(46),
    "GLM-4.6": _GLM_46,
    "GLM-4.6-FP8": _GLM_46 | _float8(92),
    "GLM-4.7": {key: value for key, value in _GLM_46.items() if key != "torch_dtype"} | {"dtype": "bfloat16"},
    "GLM-4.7-FP8": _GLM_46 | _float8(92),
}


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": 200002, "pad_token_id": 199999, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2), "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": num_layers, "num_key_value_heads": 8,
        "num_local_experts": num_experts, "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    }  # fmt: skip


GPT_OSS = {"gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128)}

# Releases for text and pictures; what they say of pictures is cut short.
_HYBRID: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06,
    "use_cache": True,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_PICTURES = {"image_token_id": 248056, "vision_start_token_id": 248053, "vision_config": {"depth": 12}}


def _wrapper(architecture: str, num_layers: int, *, tied: bool, **text: Any) -> dict[str, Any]:
    types = (["linear_attention"] * 3 + ["full_attention"]) * (num_layers // 4)
    nested = _HYBRID | {"num_hidden_layers": num_layers, "layer_types": types} | text
    return {"architectures": [architecture], "tie_word_embeddings": tied, "text_config": nested} | _PICTURES


HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _wrapper(
        "Qwen3_5ForConditionalGeneration", 24, tied=True, hidden_size=1024, intermediate_size=3584,
        num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16, tie_word_embeddings=True,
    ),
    "Qwen3.5-27B": _wrapper(
        "Qwen3_5ForConditionalGeneration", 64, tied=False, hidden_size=5120, intermediate_size=17408,
        num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": _wrapper(
        "Qwen3_5MoeForConditionalGeneration", 40, tied=False, hidden_size=2048, num_attention_heads=16,
        num_key_value_heads=2, linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, router_aux_loss_coef=0.001,
    ),
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
