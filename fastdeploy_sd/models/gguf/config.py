"""Writes the metadata of a GGUF file as config.json and generation_config.json of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy_sd.models.gguf.container import GgufFile
from fastdeploy_sd.models.gguf.metadata import Metadata
from fastdeploy_sd.models.gguf.tokenizer import Vocabulary

# Texts of control tokens that end an answer, whichever of them the file names.
_END_TEXTS = frozenset({
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
    "<|return|>", "<|call|>", "<EOT>", "_<EOT>", "< EOT >", "</s>", "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOT]", "[EOS]", "<eos>",
})  # fmt: skip
_SIZES: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_SIZES: Mapping[str, str] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DELTA_SIZES: Mapping[str, str] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_DEEPSEEK_ROUTER: Mapping[str, str] = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_GATINGS: Mapping[object, str] = {1: "softmax", 2: "sigmoid"}
_MULTIPLIERS: Mapping[str, str] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def config_json(file: GgufFile) -> dict[str, Any]:
    """Return config.json.

    Raises:
        CheckpointError: an architecture that is not served, or a key that asks for something unsupported.
    """
    data = Metadata(file, _ARCHITECTURES)
    name, model_type, add = _ARCHITECTURES[data.architecture]
    embedding = file.entries.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "tie_word_embeddings": "output.weight" not in file.entries,
    }
    if embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    config |= {key: value for stored, key in _SIZES.items() if (value := data.get(stored)) is not None}
    for key in ("embedding_length", "attention.head_count"):
        config[_SIZES[key]] = data.integer(key)
    scaling = _rope_scaling(data)
    if scaling is not None:
        config["rope_scaling"] = scaling
    _verify_rotary(data, config)
    add(data, config)
    return config


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return generation_config.json: the ids that end an answer."""
    named = [vocabulary.token_id(role) for role in ("eos", "eot", "eom")]
    controls = {vocabulary.tokens[i]: i for i, kind in enumerate(vocabulary.types) if kind == 3}  # noqa: PLR2004
    # In a vocabulary with channels, <|end|> ends a message, after which the answer goes on.
    messages = {"<|end|>"} if "<|channel|>" in controls else set()
    by_text = [i for text, i in controls.items() if text in _END_TEXTS - messages]
    return {"eos_token_id": list(dict.fromkeys(i for i in [*named, *by_text] if i is not None))}


def _rope_scaling(data: Metadata) -> dict[str, Any] | None:
    kind, factors = data.get("rope.scaling.type"), _rope_factors(data.file)
    if "factors" in factors:
        return {"rope_type": "factors", **factors}
    if factors:
        kind = "longrope"
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, **factors}
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_log_multiplier": "mscale_all_dim",
    }
    if kind == "yarn" and data.get("rope.scaling.yarn_log_multiplier") is not None:
        scaling["mscale"] = 1.0
    return scaling | {
        name: value for key, name in names.items() if (value := data.get(f"rope.scaling.{key}")) is not None
    }


def _rope_factors(file: GgufFile) -> dict[str, list[float]]:
    """Return the tables of factors that the file holds, by what Hugging Face calls them."""
    names = {"rope_freqs": "factors", "rope_factors_short": "short_factor", "rope_factors_long": "long_factor"}
    entries = {name: file.entries.get(f"{stored}.weight") for stored, name in names.items()}
    return {name: file.read(entry).reshape(-1).tolist() for name, entry in entries.items() if entry is not None}


def _verify_rotary(data: Metadata, config: dict[str, Any]) -> None:
    """A head whose dimensions do not all rotate says so in config.json, for the family to read or refuse."""
    rotary = data.get("rope.dimension_count")
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if isinstance(rotary, int) and isinstance(head_dim, int) and head_dim > 0 and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim


def _add_nothing(data: Metadata, config: dict[str, Any]) -> None:
    pass


def _add_biases(data: Metadata, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in data.file.entries


def _add_multipliers(data: Metadata, config: dict[str, Any]) -> None:
    _add_biases(data, config)
    config |= {key: value for stored, key in _MULTIPLIERS.items() if (value := data.get(stored)) is not None}


def _add_window(data: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = data.get("attention.sliding_window") or None  # 0 means none too
    pattern = data.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern


def _add_query_scaling(data: Metadata, config: dict[str, Any]) -> None:
    _add_window(data, config)
    beta = data.get("attention.temperature_scale")
    if beta is not None:
        config["rope_scaling"] = {**config.get("rope_scaling", {}), "llama_4_scaling_beta": beta}


def _add_gemma(data: Metadata, config: dict[str, Any]) -> None:
    _add_window(data, config)
    config["rms_norm_offset"] = 0.0  # the file has the sums
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["rope_local_base_freq"] = data.get("rope.freq_base_swa") or 10000.0
    config |= {f"{name}_logit_softcapping": data.get(f"{name}_logit_softcapping") for name in ("attn", "final")}
    # The largest of each generation has another scale of scores, which the file does not tell.
    hidden, heads, layers = (data.integer(key) for key in ("embedding_length", "attention.head_count", "block_count"))
    is_27b = layers == _LAYERS_OF_27B[data.architecture]
    config["query_pre_attn_scalar"] = hidden // heads if is_27b else data.integer("attention.key_length")


def _add_gpt_oss(data: Metadata, config: dict[str, Any]) -> None:
    _add_window(data, config)
    config["num_local_experts"], config["num_experts_per_tok"] = (
        data.integer(key) for key in ("expert_count", "expert_used_count")
    )
    config["intermediate_size"] = data.integer("expert_feed_forward_length")
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False  # as published; the file does not tell


def _add_qwen3_experts(data: Metadata, config: dict[str, Any]) -> None:
    config |= {key: data.integer(stored) for stored, key in _EXPERT_SIZES.items()}
    config["norm_topk_prob"] = True
    config.setdefault("intermediate_size", config["moe_intermediate_size"])


def _add_ernie_experts(data: Metadata, config: dict[str, Any]) -> None:
    config["moe_num_experts"], config["moe_k"] = data.integer("expert_count"), data.integer("expert_used_count")
    config["moe_intermediate_size"] = size = data.integer("expert_feed_forward_length")
    shared = data.get("expert_shared_feed_forward_length") or 0
    config["moe_num_shared_experts"] = shared // size if isinstance(shared, int) else shared
    config["moe_layer_start_index"] = data.get("leading_dense_block_count") or 0
    config["moe_layer_interval"] = data.get("interleave_moe_layer_step") or 1


def _add_hybrid(data: Metadata, config: dict[str, Any]) -> None:
    config["rms_norm_offset"] = 0.0  # the file has the sums
    config |= {key: data.integer(stored) for stored, key in _DELTA_SIZES.items()}
    inner, value_heads = data.integer("ssm.inner_size"), config["linear_num_value_heads"]
    config["linear_value_head_dim"] = inner // value_heads
    config.setdefault("partial_rotary_factor", 1.0)
    drafting = data.get("nextn_predict_layers")
    if isinstance(drafting, int):  # they are among the blocks
        config["num_hidden_layers"] = data.integer("block_count") - drafting
    config["full_attention_interval"] = data.get("full_attention_interval") or 4
    recurrent = data.get("attention.recurrent_layers")
    if isinstance(recurrent, list):
        kinds = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]


def _add_hybrid_experts(data: Metadata, config: dict[str, Any]) -> None:
    _add_hybrid(data, config)
    _add_qwen3_experts(data, config)
    config["shared_expert_intermediate_size"] = data.integer("expert_shared_feed_forward_length")


def _add_glm_experts(data: Metadata, config: dict[str, Any]) -> None:
    _add_biases(data, config)
    config |= {key: value for stored, key in _DEEPSEEK_ROUTER.items() if (value := data.get(stored)) is not None}
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in data.file.entries
    gating = data.get("expert_gating_func")
    config["scoring_func"] = _GATINGS.get(gating, gating)
    drafting = data.get("nextn_predict_layers")
    if isinstance(drafting, int):  # they are among the blocks
        config["num_hidden_layers"] = data.integer("block_count") - drafting


def _add_deepseek(data: Metadata, config: dict[str, Any]) -> None:
    # What the cache keeps is one head; these are those that make it.
    config.pop("head_dim", None)
    config.pop("partial_rotary_factor", None)
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["qk_rope_head_dim"] = rotary = data.integer("rope.dimension_count")
    key, value = (
        data.get(f"attention.{part}_length_mla") or data.integer(f"attention.{part}_length") for part in _PARTS
    )
    config["qk_nope_head_dim"], config["v_head_dim"] = key - rotary if isinstance(key, int) else key, value
    config["kv_lora_rank"] = data.integer("attention.kv_lora_rank")
    config["q_lora_rank"] = data.get("attention.q_lora_rank")
    config |= {name: value for stored, name in _DEEPSEEK_ROUTER.items() if (value := data.get(stored)) is not None}
    config["norm_topk_prob"] = bool(data.get("expert_weights_norm"))
    gating = data.get("expert_gating_func")
    config["scoring_func"] = _GATINGS.get(gating, gating) or "softmax"
    if config["scoring_func"] == "softmax":
        config["architectures"], config["model_type"] = ["DeepseekV2ForCausalLM"], "deepseek_v2"
        config["topk_method"] = "greedy" if config.get("n_group", 1) == 1 else "group_limited_greedy"
    elif "n_group" not in config and config.get("n_routed_experts") == _EXPERTS_OF_V3:
        config["n_group"], config["topk_group"] = 8, 4  # as published; files of before do not tell
    weight = data.get("rope.scaling.yarn_log_multiplier")
    if isinstance(weight, float) and "rope_scaling" in config:
        # This architecture's is a tenth of it, and has no other for the table.
        config["rope_scaling"]["mscale"] = config["rope_scaling"]["mscale_all_dim"] = round(10 * weight, 6)


_PARTS = "key", "value"
_EXPERTS_OF_V3 = 256
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# general.architecture -> architecture and model type in config.json, and what else it needs.
_ARCHITECTURES: Mapping[str, tuple[str, str, Callable[[Metadata, dict[str, Any]], None]]] = {
    "deepseek2": ("DeepseekV3ForCausalLM", "deepseek_v3", _add_deepseek),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _add_gemma),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _add_gemma),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe", _add_glm_experts),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", _add_gpt_oss),
    "granite": ("GraniteForCausalLM", "granite", _add_multipliers),
    "llama": ("LlamaForCausalLM", "llama", _add_biases),
    "mistral3": ("Ministral3ForCausalLM", "ministral3", _add_query_scaling),
    "phi3": ("Phi3ForCausalLM", "phi3", _add_window),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _add_nothing),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _add_biases),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _add_qwen3_experts),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next", _add_hybrid_experts),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _add_hybrid),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _add_hybrid_experts),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _add_biases),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5", _add_nothing),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _add_ernie_experts),
}
