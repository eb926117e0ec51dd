"""What llama.cpp's converter makes of gated delta nets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from fastdeploy_sd.types import F32

_MTP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def add_delta_nets(writer: gguf.GGUFWriter, config: Mapping[str, Any], num_layers: int) -> None:
    """Write their sizes."""
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(4)
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds + [False] * (num_layers - len(kinds)))
    if num_layers > len(kinds):
        writer.add_nextn_predict_layers(num_layers - len(kinds))
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def regrouped(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors under the names that the converter looks up, q | k | v and z of Qwen3-Next apart."""
    found: dict[str, Any] = {}
    for name, data in tensors.items():
        renamed = _numbered(name, config).replace("dt_bias", "dt_proj.bias")
        if "in_proj_qkvz" not in name:
            found[renamed] = data
            continue
        keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        borders = [key_dim, 2 * key_dim, 2 * key_dim + values]
        parts = [
            part.reshape(-1, data.shape[1]) for part in np.split(data.reshape(keys, -1, data.shape[1]), borders, 1)
        ]
        found[renamed.replace("qkvz", "qkv")] = np.concatenate(parts[:3])
        found[renamed.replace("qkvz", "z")] = parts[3]
    return found


def as_hybrid(stored: str, numbers: F32, config: Mapping[str, Any], architecture: str) -> F32:
    """Return a tensor as it is stored."""
    if stored.endswith("ssm_a"):
        numbers = -np.exp(numbers)
    elif "conv1d" in stored:
        numbers = numbers.reshape(len(numbers), -1)
    elif stored.endswith("norm.weight") and "ssm_norm" not in stored:
        numbers = numbers + np.float32(1)
    if architecture == "qwen3next":
        return numbers
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    sharing = config["linear_num_value_heads"] // keys

    def tiled(data: F32, size: int) -> F32:
        return data.reshape(keys, sharing, size, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)

    first = 2 * keys * config["linear_key_head_dim"]
    role = stored.split(".")[2] if stored.startswith("blk.") else ""
    if role in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate([numbers[:first], tiled(numbers[first:], width)])
    if role in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return tiled(numbers, width if role == "attn_gate" else 1)
    return np.ascontiguousarray(tiled(numbers.T, width).T) if role == "ssm_out" else numbers


def _numbered(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of an MTP layer's tensor among those of the decoder's layers."""
    num_layers = config.get("num_hidden_layers")
    if match := re.fullmatch(r"mtp\.layers\.0\.(.+)", name):
        return f"model.layers.{num_layers}.{match[1]}"
    if match := re.fullmatch(r"mtp\.(\w+)\.weight", name):
        return f"model.layers.{num_layers}.{_MTP[match[1]]}.weight"
    return name
