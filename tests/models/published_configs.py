"""config.json of the published ERNIE 4.5 releases: their keys and values, written down as facts.

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
