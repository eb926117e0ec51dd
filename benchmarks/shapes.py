"""Shapes of published models: config.json as far as it decides shapes and arithmetic, and the tensors that follow.

Models that are too large for a development machine have fewer layers, or fewer experts, than published; their names
say so. A layer costs what it costs in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]


class TensorShape(NamedTuple):
    """A tensor of a checkpoint; `dtype` as safetensors names it."""

    name: str
    dims: tuple[int, ...]
    dtype: str = "BF16"


Tensors = Iterator[TensorShape]

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON = {"hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
SHAPES: Mapping[str, Config] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "attention_bias": False, "use_sliding_window": False,
    },
    "ernie4_5-0.3b": _COMMON
    | {
        "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "vocab_size": 103424, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "use_bias": False,
    },
    "llama-3.2-1b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_SCALING, "attention_bias": False, "mlp_bias": False,
    },
    "qwen3.5-0.8b": _COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "attention_bias": False, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    },
    "ernie4_5-21b-a3b-6-layers": _COMMON
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "vocab_size": 103424,
        "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 6, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "use_bias": False, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 5, "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    "gpt-oss-20b-4-layers": _COMMON
    | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
        "tie_word_embeddings": False, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "swiglu_limit": 7.0, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
    "deepseek-v3-2-layers-32-experts": _COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 2,
        "num_attention_heads": 128, "num_key_value_heads": 128, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8,
        "topk_group": 4, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip

# Families of which an MTP layer in a folder of its own is served, in ERNIE's names.
MTP_FOLDER_FAMILIES = ("ernie4_5", "llama", "qwen3")


def tensor_shapes(config: Config) -> Tensors:
    """Yield every tensor."""
    hidden = config["hidden_size"]
    yield TensorShape("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(f"model.layers.{layer}", config, layer)
    yield TensorShape("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield TensorShape("lm_head.weight", (config["vocab_size"], hidden))
    if config.get("mtp_num_hidden_layers"):
        yield TensorShape("mtp.fc.weight", (hidden, 2 * hidden))
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield TensorShape(f"mtp.{norm}.weight", (hidden,))
        yield from _layer("mtp.layers.0", config, config["layer_types"].index("full_attention"))


def mtp_folder_tensors(config: Config) -> Tensors:
    """Yield the tensors of one MTP layer in ERNIE's names: it shares the target's embedding, final norm and head."""
    hidden = config["hidden_size"]
    yield TensorShape("model.mtp_emb_norm.0.weight", (hidden,))
    yield TensorShape("model.mtp_hidden_norm.0.weight", (hidden,))
    yield TensorShape("model.mtp_linear_proj.0.weight", (hidden, 2 * hidden))
    yield from _layer("model.mtp_block.0", config, 0)


def _layer(root: str, config: Config, i: int) -> Tensors:
    """Yield the tensors of decoder layer i."""
    hidden, family = config["hidden_size"], config["model_type"]
    types = config.get("layer_types", ())
    attention = _ATTENTIONS.get(family, _attention)
    if types and types[i] == "linear_attention":
        attention = _gated_delta_net
    yield TensorShape(f"{root}.input_layernorm.weight", (hidden,))
    yield from attention(root, config)
    yield TensorShape(f"{root}.post_attention_layernorm.weight", (hidden,))
    if family == "gpt_oss":
        yield from _mxfp4_experts(f"{root}.mlp", config)
    elif i >= config.get("first_k_dense_replace", config.get("moe_layer_start_index", i + 1)):
        yield from _experts(f"{root}.mlp", config)
    else:
        yield from _dense(f"{root}.mlp", hidden, config["intermediate_size"])


def _attention(root: str, config: Config) -> Tensors:
    hidden, dim, family = config["hidden_size"], config["head_dim"], config["model_type"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    has_gate, has_bias = family == "qwen3_5_text", family == "gpt_oss"
    for name, rows, columns in (
        ("q_proj", q_size * (1 + has_gate), hidden),
        ("k_proj", kv_size, hidden),
        ("v_proj", kv_size, hidden),
        ("o_proj", hidden, q_size),
    ):
        yield TensorShape(f"{root}.self_attn.{name}.weight", (rows, columns))
        if has_bias:
            yield TensorShape(f"{root}.self_attn.{name}.bias", (rows,))
    if has_bias:
        yield TensorShape(f"{root}.self_attn.sinks", (config["num_attention_heads"],))
    if family in ("qwen3", "qwen3_5_text"):
        yield TensorShape(f"{root}.self_attn.q_norm.weight", (dim,))
        yield TensorShape(f"{root}.self_attn.k_norm.weight", (dim,))


def _gated_delta_net(root: str, config: Config) -> Tensors:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    part = f"{root}.linear_attn"
    for name, rows in (("in_proj_qkv", 2 * keys + values), ("in_proj_z", values), ("in_proj_b", heads)):
        yield TensorShape(f"{part}.{name}.weight", (rows, hidden))
    yield TensorShape(f"{part}.in_proj_a.weight", (heads, hidden))
    yield TensorShape(f"{part}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"]))
    yield TensorShape(f"{part}.A_log", (heads,))
    yield TensorShape(f"{part}.dt_bias", (heads,))
    yield TensorShape(f"{part}.norm.weight", (config["linear_value_head_dim"],))
    yield TensorShape(f"{part}.out_proj.weight", (hidden, values))


def _latent_attention(root: str, config: Config) -> Tensors:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    part = f"{root}.self_attn"
    yield TensorShape(f"{part}.q_a_proj.weight", (q_rank, hidden))
    yield TensorShape(f"{part}.q_a_layernorm.weight", (q_rank,))
    yield TensorShape(f"{part}.q_b_proj.weight", (heads * (nope + rope), q_rank))
    yield TensorShape(f"{part}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
    yield TensorShape(f"{part}.kv_a_layernorm.weight", (kv_rank,))
    yield TensorShape(f"{part}.kv_b_proj.weight", (heads * (nope + value), kv_rank))
    yield TensorShape(f"{part}.o_proj.weight", (hidden, heads * value))


def _dense(root: str, hidden: int, inner: int) -> Tensors:
    yield TensorShape(f"{root}.gate_proj.weight", (inner, hidden))
    yield TensorShape(f"{root}.up_proj.weight", (inner, hidden))
    yield TensorShape(f"{root}.down_proj.weight", (hidden, inner))


def _experts(root: str, config: Config) -> Tensors:
    hidden, inner, is_ernie = config["hidden_size"], config["moe_intermediate_size"], "moe_num_experts" in config
    count = config["moe_num_experts" if is_ernie else "n_routed_experts"]
    num_shared = config["moe_num_shared_experts" if is_ernie else "n_shared_experts"]
    bias = ("moe_statics.", (1, count)) if is_ernie else ("gate.", (count,))
    yield TensorShape(f"{root}.gate.weight", (count, hidden))
    yield TensorShape(f"{root}.{bias[0]}e_score_correction_bias", bias[1])
    for expert in range(count):
        yield from _dense(f"{root}.experts.{expert}", hidden, inner)
    yield from _dense(f"{root}.shared_experts", hidden, inner * num_shared)


def _mxfp4_experts(root: str, config: Config) -> Tensors:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield TensorShape(f"{root}.router.weight", (count, hidden))
    yield TensorShape(f"{root}.router.bias", (count,))
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield TensorShape(f"{root}.experts.{name}_blocks", (count, rows, columns // 32, 16), "U8")
        yield TensorShape(f"{root}.experts.{name}_scales", (count, rows, columns // 32), "U8")
        yield TensorShape(f"{root}.experts.{name}_bias", (count, rows))


_ATTENTIONS: Mapping[str, Callable[[str, Config], Tensors]] = {"deepseek_v3": _latent_attention}
