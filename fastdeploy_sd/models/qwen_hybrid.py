"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, attention with an output gate in the others.

Releases for text and pictures have the same decoder in `text_config`; it is served for text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastdeploy_sd.models.attention_config import DELTA_DIM_MULTIPLE, GatedDeltaConfig
from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig, read_decoder
from fastdeploy_sd.models.layer_windows import FULL
from fastdeploy_sd.models.qwen import read_experts

_LINEAR = "linear_attention"
# What a config.json may leave out; the published modelling code's own values.
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "norm_topk_prob": True, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "attention_bias": (False,),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
}
# Rotary embedding of pictures; the three positions of a text token are the same.
_OF_PICTURES = ("mrope_interleaved", "mrope_section")


def read_dense(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen3_5ForCausalLM; raises as read_decoder."""
    reader.require_neutral(_NEUTRAL)
    decoder = read_decoder(
        _without_pictures(reader),
        reads=("partial_rotary_factor",),
        find_windows=lambda _, num_layers: [None] * num_layers,
        qk_norm=True,
        output_gate=True,
    )
    net, is_full = _read_delta_net(reader), _full_layers(reader, decoder.num_layers)
    mixed = decoder.with_layers(lambda i, layer: layer if is_full[i] else replace(layer, attention=net))
    return replace(mixed, norm_offset=reader.number("rms_norm_offset"))


def read_moe(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen3NextForCausalLM or Qwen3_5MoeForCausalLM; raises as read_decoder."""
    if reader.values.get("intermediate_size") is None:  # of layers without experts
        reader = reader.replaced(intermediate_size=reader.integer("moe_intermediate_size"))
    shared = reader.integer("shared_expert_intermediate_size")

    def gated(moe: MoeConfig) -> MoeConfig:
        return replace(moe, shared_intermediate_size=shared, shared_gate=True)

    return read_experts(reader, read_dense(reader), gated)


def read_dense_wrapper(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen3_5ForConditionalGeneration; raises as read_decoder."""
    return read_dense(_text_of(reader))


def read_moe_wrapper(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen3_5MoeForConditionalGeneration; raises as read_decoder."""
    return read_moe(_text_of(reader))


def _text_of(reader: FieldReader) -> FieldReader:
    text, tied = reader.nested("text_config"), reader.values.get("tie_word_embeddings")
    return text if tied is None else text.replaced(tie_word_embeddings=tied)


def _without_pictures(reader: FieldReader) -> FieldReader:
    found = {
        key: {name: value for name, value in reader.values[key].items() if name not in _OF_PICTURES}
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(reader.values.get(key), Mapping)
    }
    return reader.replaced(**found)


def _read_delta_net(reader: FieldReader) -> GatedDeltaConfig:
    key_heads, value_heads = reader.integer("linear_num_key_heads"), reader.integer("linear_num_value_heads")
    if value_heads % key_heads != 0:
        expected = f"a multiple of linear_num_key_heads ({key_heads})"
        raise reader.error("linear_num_value_heads", expected, value_heads)
    names = ("linear_key_head_dim", "linear_value_head_dim")
    for name in names:
        if reader.integer(name) % DELTA_DIM_MULTIPLE != 0:
            raise reader.error(name, f"a multiple of {DELTA_DIM_MULTIPLE}", reader.integer(name))
    key_dim, value_dim = map(reader.integer, names)
    return GatedDeltaConfig(key_heads, value_heads, key_dim, value_dim, reader.integer("linear_conv_kernel_dim"))


def _full_layers(reader: FieldReader, num_layers: int) -> Sequence[bool]:
    """Return which layers have attention; at least one must: requests are told apart by the blocks of its KV."""
    types, interval = reader.values.get("layer_types"), reader.integer("full_attention_interval")
    if types is None:
        types = [_LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, _LINEAR) for kind in types):
        raise reader.error("layer_types", f"a list of {num_layers} '{FULL}' or '{_LINEAR}'", types)
    if FULL not in types:
        raise reader.error("layer_types", f"at least one '{FULL}'", types)
    return [kind == FULL for kind in types]
