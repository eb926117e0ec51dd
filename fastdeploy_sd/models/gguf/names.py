"""Gives the tensors of a GGUF file the names and shapes that they have in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.gguf.order import Change, DeltaHeads, both, decay_logarithms, halves
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
_NUMBERED: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_HYBRID: Mapping[str, str] = {
    **_NUMBERED,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
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
    "glm4moe": _NUMBERED,
    "gpt-oss": _GPT_OSS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen3next": _HYBRID,
    "qwen35": _HYBRID,
    "qwen35moe": _HYBRID,
}
# Those whose converter moves the rows of q and k for kernels that rotate neighbours.
_PAIRED = ("granite", "llama", "mistral3", "smollm3")
# Those whose converter moves the value heads that share a key head apart: the first of each, the second of each ...
_TILED = ("qwen35", "qwen35moe")
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
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
} | {f"{stored}.bias": f"mlp.experts.{name}_bias" for stored, name in _OF_EXPERTS.items()}
# Read with the configuration, or of no use when a model runs.
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under its name in a Hugging Face checkpoint.

    Attributes:
        change: what makes the tensor of Hugging Face of the one that is stored; None = it is that.
        columns: those that are stored, in the order of Hugging Face; none = they are in order.
    """

    name: str
    entry: TensorInfo
    change: Change | None = None
    columns: tuple[range, ...] = ()


def name_tensors(
    entries: Mapping[str, TensorInfo],
    architecture: str,
    num_heads: int,
    num_kv_heads: int,
    delta: DeltaHeads | None = None,
) -> Iterator[Named]:
    """Yield all tensors that weights are read from, an expert each of those that are stacked.

    Raises:
        CheckpointError: a tensor of an unknown name.
    """
    of_layer = {**_OF_LAYER, **_OF_ARCHITECTURE.get(architecture, {})}
    changes, order = _changes(architecture, num_heads, num_kv_heads, delta)
    for stored, entry in entries.items():
        if stored in _OF_CONFIG:
            continue
        base, _, kind = stored.rpartition(".")
        match, bare = _LAYER.fullmatch(base), _LAYER.fullmatch(stored)
        if match is None and base in _WHOLE:
            yield Named(f"{_WHOLE[base]}.{kind}", entry)
        elif match is not None and match[2] in of_layer:
            name = f"model.layers.{match[1]}.{of_layer[match[2]]}.{kind}"
            own = order if match[2] == "ssm_out" else ()
            yield Named(name, _shaped(match[2], entry), changes.get(match[2]), own)
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
        elif bare is not None and bare[2] in _BARE:
            yield Named(f"model.layers.{bare[1]}.{_BARE[bare[2]]}", entry, changes.get(bare[2].partition(".")[0]))
        else:
            raise CheckpointError(f"{entry.path}: tensor {shown(stored)}: expected one of a known name, got another")


def _changes(
    architecture: str, num_heads: int, num_kv_heads: int, delta: DeltaHeads | None
) -> tuple[Mapping[str, Change], tuple[range, ...]]:
    """Return by name in a layer what is to be undone, and the order of the columns of `ssm_out`."""
    if architecture in _PAIRED:
        return {"attn_q": halves(num_heads), "attn_k": halves(num_kv_heads)}, ()
    if delta is None:
        return {}, ()
    moved = delta.changes() if architecture in _TILED else {}
    columns = delta.columns() if architecture in _TILED else ()
    return {**moved, "ssm_a": both(decay_logarithms, moved.get("ssm_a"))}, columns


def _shaped(stored: str, entry: TensorInfo) -> TensorInfo:
    """Return a convolution's weights (channels, width) as (channels, 1, width), others as they are."""
    return replace(entry, shape=(entry.shape[0], 1, *entry.shape[1:])) if stored == "ssm_conv1d" else entry


def _experts(entry: TensorInfo) -> Iterator[TensorInfo]:
    size = (entry.end - entry.begin) // max(entry.shape[0], 1)
    for e in range(entry.shape[0]):
        begin = entry.begin + e * size
        yield replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)
