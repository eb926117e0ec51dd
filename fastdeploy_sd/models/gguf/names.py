"""Gives the tensors of a GGUF file the names and shapes that they have in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import TensorInfo

_WHOLE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DEEPSEEK: Mapping[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_GPT_OSS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
# What an architecture stores under other names.
_OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "deepseek2": _DEEPSEEK,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "glm4moe": _GLM,
    "gpt-oss": _GPT_OSS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
# Those whose converter moves the rows of q and k for kernels that rotate neighbours.
_PAIRED = ("granite", "llama", "mistral3", "smollm3")
# Stacked over experts.
_OF_EXPERTS: Mapping[str, str] = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
# Stacked over heads: what latent vectors are multiplied with, see LatentWeights.
_OF_HEADS: Mapping[str, str] = {
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_STACKED = 3  # dimensions
# Those that are no module's weight or bias there.
_BARE: Mapping[str, str] = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
} | {f"{stored}.bias": f"mlp.experts.{name}_bias" for stored, name in _OF_EXPERTS.items()}
# Read with the configuration, or of no use when a model runs.
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under its name in a Hugging Face checkpoint.

    Attributes:
        halves_of: heads whose rows lie in pairs (i, i + half) one after the other; 0 = rows as they should be.
    """

    name: str
    entry: TensorInfo
    halves_of: int = 0


def name_tensors(
    entries: Mapping[str, TensorInfo], architecture: str, num_heads: int, num_kv_heads: int
) -> Iterator[Named]:
    """Yield all tensors that weights are read from, an expert each of those that are stacked.

    Raises:
        CheckpointError: a tensor of an unknown name.
    """
    of_layer = {**_OF_LAYER, **_OF_ARCHITECTURE.get(architecture, {})}
    halves = {"attn_q": num_heads, "attn_k": num_kv_heads} if architecture in _PAIRED else {}
    for stored, entry in entries.items():
        if stored in _OF_CONFIG:
            continue
        base, _, kind = stored.rpartition(".")
        match = _LAYER.fullmatch(base)
        if match is None and base in _WHOLE:
            yield Named(f"{_WHOLE[base]}.{kind}", entry)
        elif match is not None and match[2] in of_layer:
            yield Named(f"model.layers.{match[1]}.{of_layer[match[2]]}.{kind}", entry, halves.get(match[2], 0))
        elif match is not None and match[2] in _OF_EXPERTS and len(entry.shape) == _STACKED:
            for e, part in enumerate(_experts(entry)):
                yield Named(f"model.layers.{match[1]}.mlp.experts.{e}.{_OF_EXPERTS[match[2]]}.{kind}", part)
        elif match is not None and match[2] in _OF_HEADS and len(entry.shape) == _STACKED:
            heads, rows, columns = entry.shape
            name = f"model.layers.{match[1]}.{_OF_HEADS[match[2]]}.{kind}"
            yield Named(name, replace(entry, shape=(heads * rows, columns)))
        elif match is not None and match[2] == "exp_probs_b" and architecture == "ernie4_5-moe":
            name = f"model.layers.{match[1]}.mlp.moe_statics.e_score_correction_bias"
            yield Named(name, replace(entry, shape=(1, *entry.shape)))
        elif match is not None and f"{match[2]}.{kind}" in _BARE:
            yield Named(f"model.layers.{match[1]}.{_BARE[f'{match[2]}.{kind}']}", entry)
        else:
            raise CheckpointError(f"{entry.path}: tensor {shown(stored)}: expected one of a known name, got another")


def _experts(entry: TensorInfo) -> Iterator[TensorInfo]:
    size = (entry.end - entry.begin) // max(entry.shape[0], 1)
    for e in range(entry.shape[0]):
        begin = entry.begin + e * size
        yield replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)
