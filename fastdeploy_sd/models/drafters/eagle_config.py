"""Reads the config.json of an EAGLE head, as its trainers write it: flat, or in the container of `speculators`.

Knows no tensors. Source: SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, for keys and their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM
from fastdeploy_sd.models.registry import read_draft_config
from fastdeploy_sd.models.weights.source import ModelSource

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "return_hidden_post_norm", "bias")
_FIELDS: Mapping[str, Field] = {
    **dict.fromkeys(_FLAGS, Boolean()),
    "use_aux_hidden_state": Boolean(default=True),
    "draft_vocab_size": Integer(1, MAX_I32),
    "target_hidden_size": Integer(1, 1 << 24),
}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED, _LAYERS = "eagle_config", "transformer_layer_config"
# What a head's own layers may leave out; rotary embedding too, which then has the base 10,000 and no scaling.
_DEFAULTS = {"rms_norm_eps": 1e-6}
_MOST_LAYER_IDS = 64
# Trainers' names for one key.
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What an EAGLE head computes.

    Attributes:
        decoder: of its own layers; its vocabulary is the one that it drafts from.
        reads: see DraftWeights.
        vocab_size, target_size: of the target: its tokens, and the length of its hidden rows.
        norm_before_residual: the residual stream begins with the normed hidden row.
        feeds_normed: the next draft reads the row after the output norm.
        mask_token: of the rows of further drafts, where one pass makes all drafts; None = it does not.
        flags: those that config.json has, of norm_before_fc, fc_norm and bias; where it has not, the tensors tell.
    """

    decoder: DecoderConfig
    reads: tuple[int, ...]
    vocab_size: int
    target_size: int
    norm_before_residual: bool
    feeds_normed: bool
    flags: Mapping[str, bool]
    mask_token: int | None = None


def read_eagle(source: ModelSource, target: DecoderConfig) -> EagleConfig:
    """Read the config.json of an EAGLE-1 or EAGLE-2 head; raises CheckpointError as read_eagle3."""
    reader, decoder = _read(source, target)
    if decoder.hidden_size != target.hidden_size:
        raise reader.error("hidden_size", f"{target.hidden_size} as in the target", decoder.hidden_size)
    if target.logits_scale != 1.0:  # which the rows after its final norm have in them
        expected = "a target whose logits have no factor (nothing else is supported)"
        raise CheckpointError(f"{source.path}: expected {expected}, got {target.logits_scale:g}")
    flags = _flags(reader, "bias")
    return EagleConfig(
        decoder, (FINAL_NORM,), decoder.vocab_size, target.hidden_size, False, feeds_normed=False, flags=flags
    )


def read_p_eagle(source: ModelSource, target: DecoderConfig) -> EagleConfig:
    """Read the config.json of a P-EAGLE head; raises as read_eagle3."""
    return replace(read_eagle3(source, target), mask_token=mask_token(source, target, _MASK_TOKENS))


def mask_token(source: ModelSource, target: DecoderConfig, keys: Sequence[str], nested_key: str = _NESTED) -> int:
    """Return the token of rows that are to be drafted, which config.json has under one of some keys.

    `nested_key`: of a map that may have it.

    Raises CheckpointError: none is there, or it is no token of the target.
    """
    fields = dict.fromkeys(keys, Integer(0, target.vocab_size - 1))
    nested = read_map(source.config, nested_key, str(source.config_path))
    reader = FieldReader({**source.config, **nested}, fields, str(source.config_path))
    key = next((key for key in keys if reader.values.get(key) is not None), keys[0])
    return reader.integer(key)


def read_eagle3(source: ModelSource, target: DecoderConfig) -> EagleConfig:
    """Read the config.json of an EAGLE-3 head.

    Raises CheckpointError: a key is missing, mistyped, out of range or unsupported, or contradicts the target.
    """
    reader, decoder = _read(source, target)
    size = reader.integer("target_hidden_size", decoder.hidden_size)
    if size != target.hidden_size:
        raise reader.error("target_hidden_size", f"the target's {target.hidden_size}", size)
    is_container = _LAYERS in source.config
    has_rule = reader.values.get("norm_before_residual") is not None
    draft_vocab = reader.integer("draft_vocab_size", decoder.vocab_size)
    if draft_vocab > decoder.vocab_size:
        raise reader.error("draft_vocab_size", f"at most vocab_size ({decoder.vocab_size})", draft_vocab)
    reads = _layers_read(reader, source.config, target.num_layers)
    return EagleConfig(
        replace(decoder, vocab_size=draft_vocab),
        reads if reader.boolean("use_aux_hidden_state") else (FINAL_NORM,),
        vocab_size=decoder.vocab_size,
        target_size=size,
        norm_before_residual=reader.boolean("norm_before_residual") if has_rule else is_container,
        feeds_normed=reader.boolean("norm_output") or reader.boolean("return_hidden_post_norm"),
        flags=_flags(reader, "norm_before_fc", "fc_norm"),
    )


def _read(source: ModelSource, target: DecoderConfig) -> tuple[FieldReader, DecoderConfig]:
    """Return a reader of the head's keys, and the decoder that its layers are."""
    where = str(source.config_path)
    reader = FieldReader({**source.config, **read_map(source.config, _NESTED, where)}, _FIELDS, where)
    reader.require_neutral({"eh_proj_before_attn": (False,)})
    # Heads are Llama-shaped, whatever the target is; q and k norms and biases show in the tensors.
    return reader, read_own_decoder(source, target, "LlamaForCausalLM")


def read_own_decoder(source: ModelSource, target: DecoderConfig, architecture: str) -> DecoderConfig:
    """Return the decoder that a head's own layers are; raises CheckpointError as read_eagle3."""
    where = str(source.config_path)
    layers = read_map(source.config, _LAYERS, where)
    values = {"max_position_embeddings": target.max_position, **_DEFAULTS}
    values |= {key: value for key, value in (layers or source.config).items() if value is not None}
    decoder = read_draft_config(values | {"architectures": [architecture]}, where)
    if decoder.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{where}: vocab_size: expected {target.vocab_size} as in the target, got {decoder.vocab_size}"
        )
    # The context that a head was trained on is no bound: it computes from differences of positions.
    return replace(decoder, max_position=max(decoder.max_position, target.max_position))


def read_map(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return the map under a key, {} where there is none; raises CheckpointError: it is no map."""
    found = values.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: {key}: expected a map, got {shown(found)}")
    return found


def _flags(reader: FieldReader, *names: str) -> Mapping[str, bool]:
    return {name: reader.boolean(name) for name in names if reader.values.get(name) is not None}


def _layers_read(reader: FieldReader, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input is read.

    SGLang and SpecForge, which write `eagle_config`, number layers by their outputs, vLLM and speculators by their
    inputs.
    """
    nested = read_map(config, _NESTED, reader.where).get(_LAYER_IDS)
    ids, shift = (nested, 1) if nested else (config.get(_LAYER_IDS), 0)
    if not ids:
        default = (2, num_layers // 2, num_layers - 3)
        if min(default) < 0:
            raise reader.error(_LAYER_IDS, f"layers of the target, which has {num_layers}", None)
        return default
    return layer_ids(reader, _LAYER_IDS, ids, num_layers, shift)


def layer_ids(reader: FieldReader, key: str, ids: Any, num_layers: int, shift: int) -> tuple[int, ...]:
    """Return the layers whose input is read, `shift` after those that a key has; raises CheckpointError."""
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) <= _MOST_LAYER_IDS
    if not is_list or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise reader.error(key, "a list of layer numbers", ids)
    return verify_layers(reader, key, [i + shift for i in ids], num_layers, got=ids)


def verify_layers(reader: FieldReader, key: str, layers: Sequence[int], num_layers: int, got: Any) -> tuple[int, ...]:
    """Return layers whose input is read; raises CheckpointError: the target has not all of them. `got`: the file's."""
    if not all(0 <= layer <= num_layers for layer in layers):
        raise reader.error(key, f"layers of the target, which has {num_layers}", got)
    return tuple(layers)
