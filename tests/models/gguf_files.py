"""Writes GGUF files of tiny models with the package gguf, which llama.cpp's converter uses too."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Mapping

import gguf
import numpy as np

from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.bf16 import from_bf16
from fastdeploy_sd.ops.rope_table import Llama3Scaling
from fastdeploy_sd.types import F32, U8, U16
from tests.models import golden, rewrite

# Where the halves of a block lie.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


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
    """Write a golden model of Llama, Qwen2 or Qwen3, dense or with experts.

    Args:
        types: of the matrices, by what their names in the file contain; one for all. Others stay float32.
        change: called with what is about to be written.
    """
    config = json.loads((golden.ROOT / model / "config.json").read_text())
    architecture = config["model_type"].replace("_", "")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_tokenizer(writer, model)
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        inverse = rope["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
        scaling = Llama3Scaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
        factors = inverse / scaling.scale(inverse, rope["rope_theta"])[0]
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, bits in _stacked(rewrite.read(model)).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        numbers, stored = from_bf16(bits), _stored_name(name)
        if architecture == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            heads = config["num_attention_heads" if ".attn_q." in stored else "num_key_value_heads"]
            numbers = _pairs(numbers, heads)
        kind = types if isinstance(types, str) else next((t for part, t in types.items() if part in stored), "F32")
        _add(writer, stored, numbers, kind if numbers.ndim > 1 else "F32")
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(tensors: Mapping[str, U16]) -> dict[str, U16]:
    """Return tensors with those of all experts as one."""
    found: dict[str, list[U16]] = {}
    for name, bits in tensors.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(bits)
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()}


def _add(writer: gguf.GGUFWriter, name: str, numbers: F32, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    data = numbers if kind == "F32" else gguf.quants.quantize(numbers, number)
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=number)


def _stored_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, role = base.split(".", 3)
        return f"blk.{layer}.{_NAMES[role]}.{kind}"
    return f"{_NAMES[base]}.{kind}"


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
