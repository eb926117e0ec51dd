"""Writes GGUF files of tiny models with the package gguf, which llama.cpp's converter uses too."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.rope_table import Llama3Scaling
from fastdeploy_sd.types import F32, U8, U16
from tests.models import golden, rewrite
from tests.models.gguf_hybrids import add_delta_nets, as_hybrid, regrouped

# Where the halves of a block lie.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
# model_type in config.json -> general.architecture, where they differ.
_ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_PAIRED = ("granite", "llama", "mistral3", "smollm3")
_SCALES = {
    "attention_multiplier": "attention_scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def random_blocks(rng: np.random.Generator, name: str, num_rows: int, num_columns: int) -> U8:
    """Return u8[rows, bytes of a row]: any bits, but scales of trained weights' size."""
    block = BLOCK_TYPES[name]
    blocks = rng.integers(0, 256, (num_rows * num_columns // block.size, block.num_bytes), np.uint8)
    for at in _HALVES[name]:
        halves = (rng.standard_normal((len(blocks), 1)) * 0.01 / block.size**0.5).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(112, 120, len(blocks))
    return blocks.reshape(num_rows, -1)


def write(
    path: pathlib.Path,
    model: str,
    types: Mapping[str, str] | str,
    change: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> pathlib.Path:
    """Write a golden model, as the converter does.

    Args:
        types: of the matrices, by what their names in the file contain; one for all. Others stay float32.
        change: called with what is about to be written.
    """
    config = json.loads((golden.ROOT / model / "config.json").read_text())
    tensors = rewrite.read(model)
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    num_layers = config["num_hidden_layers"] + any("eh_proj" in name or name == "mtp.fc.weight" for name in tensors)
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if "kv_lora_rank" in config else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "kv_lora_rank" in config:
        _add_latents(writer, config)
    elif config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    _add_experts(writer, config, num_layers)
    if "linear_num_key_heads" in config:
        add_delta_nets(writer, config, num_layers)
    for key, name in _SCALES.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{name}")(config[key])
    _add_tokenizer(writer, model)
    _add_rope(writer, config)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    # The converter writes MTP layers of more architectures than the package knows to have them.
    names, drafting = (gguf.get_tensor_name_map(own, num_layers) for own in (arch, gguf.MODEL_ARCH.GLM4_MOE))
    named = regrouped(tensors, config)
    for name, bits in _stacked(_split_experts(_split_latents(named, config))).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        renamed = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stored = names.get_name(renamed, (".weight", ".bias")) or drafting.get_name(renamed, (".weight", ".bias"))
        assert stored is not None
        if bits.dtype == np.uint8:
            writer.add_tensor(stored, bits, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        numbers = _as_stored(stored, widen(bits), config, architecture)
        kind = types if isinstance(types, str) else next((t for part, t in types.items() if part in stored), "F32")
        _add(writer, stored, numbers, kind if numbers.ndim > 1 else "F32")
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_stored(stored: str, numbers: F32, config: Mapping[str, Any], architecture: str) -> F32:
    if architecture in _PAIRED and (".attn_q." in stored or ".attn_k." in stored):
        return _pairs(numbers, config["num_attention_heads" if ".attn_q." in stored else "num_key_value_heads"])
    if architecture.startswith("gemma") and stored.endswith("norm.weight"):
        return numbers + np.float32(1)
    return as_hybrid(stored, numbers, config, architecture) if "linear_num_key_heads" in config else numbers


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int) -> None:
    if "n_routed_experts" in config:
        _add_deepseek_router(writer, config, num_layers)
    if "num_experts_per_tok" in config:
        counts = "num_local_experts", "n_routed_experts", "num_experts"
        writer.add_expert_count(next(config[key] for key in counts if key in config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))


def _add_deepseek_router(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int) -> None:
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    is_softmax = config.get("scoring_func") == "softmax"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SOFTMAX if is_softmax else kinds.SIGMOID)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_nextn_predict_layers(num_layers - config["num_hidden_layers"])


def _add_latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])


def _split_latents(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with what latent vectors are multiplied with, head by head: [heads, latent, key] and values."""
    found: dict[str, Any] = {}
    for name, data in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = data
            continue
        by_head = data.reshape(config["num_attention_heads"], -1, data.shape[1])
        keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
    return found


def _split_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with gpt-oss's experts as its converter has them: gate and up apart, as [E, N, K] or as blocks."""
    found: dict[str, Any] = {}
    for name, data in tensors.items():
        stack = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|)", name)
        if name.endswith("_scales"):
            continue
        if stack is None:
            found[name + ".weight" * name.endswith("sinks")] = data
            continue
        kind = "bias" if stack[3] == "_bias" else "weight"
        own = data if stack[3] else data.swapaxes(1, 2)
        if stack[3] == "_blocks":
            own = _blocks(data, tensors[name.replace("_blocks", "_scales")])
        parts = {"down": own} if stack[2] == "down" else {"gate": own[:, ::2], "up": own[:, 1::2]}
        found |= {f"{stack[1]}.{part}_proj.{kind}": np.ascontiguousarray(half) for part, half in parts.items()}
    return found


def _blocks(pairs: U8, scales: U8) -> U8:
    """Blocks u8[E, N, B, 16], neighbours in a byte, and scales u8[E, N, B] -> u8[E, N, B * 17], i and i + 16 in one."""
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:3], 2, 16)
    halves = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(*pairs.shape[:2], -1)


def _stacked(tensors: Mapping[str, U16]) -> dict[str, U16]:
    """Return tensors with those of all experts as one."""
    found: dict[str, list[U16]] = {}
    for name, bits in tensors.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(bits)
    return {name: np.stack(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters", config)
    rope = rope.get("full_attention", rope)
    head_dim = (
        config.get("qk_rope_head_dim")
        or config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"]
    )
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    if kind == "llama3":
        inverse = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        scaling = Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
        factors = inverse / scaling.scale(inverse, rope["rope_theta"])[0]
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    elif kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
        if "kv_lora_rank" in config:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add(writer: gguf.GGUFWriter, name: str, numbers: F32, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    data = numbers if kind == "F32" else gguf.quants.quantize(numbers, number)
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=number)


def _pairs(numbers: F32, heads: int) -> F32:
    """As the converter moves rows of Llama's q and k: those that rotate together become neighbours."""
    return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, model: str) -> None:
    spec = json.loads((golden.ROOT / model / "tokenizer.json").read_text())
    files = json.loads((golden.ROOT / model / "tokenizer_config.json").read_text())
    vocab = spec["model"]["vocab"]
    added = {token["content"]: token for token in spec["added_tokens"]}
    vocab = {**vocab, **{text: token["id"] for text, token in added.items()}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [4 - added[t]["special"] if t in added else 1 for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("stablelm2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for role in ("bos", "eos", "unk", "pad"):
        token = files.get(f"{role}_token")
        if token is not None:
            text = token if isinstance(token, str) else token["content"]
            getattr(writer, f"add_{role}_token_id")(vocab[text])
    if files.get("chat_template"):
        writer.add_chat_template(files["chat_template"])
