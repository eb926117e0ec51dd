"""Reads the config.json of a DFlash block drafter: as z-lab writes it, or in the container of `speculators`.

Source: z-lab/dflash, sgl-project/SpecForge, vllm-project/speculators, for keys and their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.eagle_config import (
    EagleConfig,
    layer_ids,
    mask_token,
    read_map,
    read_own_decoder,
    verify_layers,
)
from fastdeploy_sd.models.weights.source import ModelSource

_NESTED = "dflash_config"
_MOST_ROWS = 64
_FIELDS: Mapping[str, Field] = {
    "block_size": Integer(2, _MOST_ROWS),
    "draft_vocab_size": Integer(1, MAX_I32),
    "num_target_layers": Integer(1, MAX_I32),
    "sample_from_anchor": Boolean(),
    "sliding_window_non_causal": Boolean(),
}
# Both number layers by their outputs.
_LAYER_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(frozen=True, slots=True)
class DFlashConfig(EagleConfig):
    """What a DFlash drafter computes.

    Attributes:
        block_size: rows of a block at most: of the newest token, and of tokens to be drafted.
        has_draft_of_newest: the newest token's row makes a draft too.
        sees_all_in_window: rows see those after them in layers with a window too.
    """

    block_size: int = 0
    has_draft_of_newest: bool = False
    sees_all_in_window: bool = False

    @property
    def num_drafts(self) -> int:
        """The most drafts of a block."""
        return self.block_size - (not self.has_draft_of_newest)


def read_dflash(source: ModelSource, target: DecoderConfig) -> DFlashConfig:
    """Read the config.json; raises CheckpointError as read_eagle3."""
    where = str(source.config_path)
    nested = read_map(source.config, _NESTED, where)
    reader = FieldReader({**source.config, **nested}, _FIELDS, where)
    decoder = read_own_decoder(source, target, "Qwen3ForCausalLM")
    if decoder.hidden_size != target.hidden_size:
        raise reader.error("hidden_size", f"{target.hidden_size} as in the target", decoder.hidden_size)
    num_layers = reader.integer("num_target_layers", target.num_layers)
    if num_layers != target.num_layers:
        raise reader.error("num_target_layers", f"the target's {target.num_layers}", num_layers)
    draft_vocab = reader.integer("draft_vocab_size", decoder.vocab_size)
    if draft_vocab > decoder.vocab_size:
        raise reader.error("draft_vocab_size", f"at most vocab_size ({decoder.vocab_size})", draft_vocab)
    return DFlashConfig(
        replace(decoder, vocab_size=draft_vocab),
        _layers_read(reader, decoder.num_layers, target.num_layers),
        vocab_size=decoder.vocab_size,
        target_size=target.hidden_size,
        norm_before_residual=False,
        feeds_normed=False,
        flags={},
        mask_token=mask_token(source, target, ("mask_token_id",), _NESTED),
        block_size=reader.integer("block_size"),
        has_draft_of_newest=reader.boolean("sample_from_anchor"),
        sees_all_in_window=reader.boolean("sliding_window_non_causal"),
    )


def _layers_read(reader: FieldReader, num_own: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose input is read; by default as many as there are own ones, evenly spread."""
    key = next((key for key in _LAYER_IDS if reader.values.get(key)), None)
    if key is not None:
        return layer_ids(reader, key, reader.values[key], num_layers, shift=1)
    found = [round(1 + i * (num_layers - 4) / (num_own - 1)) for i in range(num_own)] if num_own > 1 else []
    return verify_layers(reader, _LAYER_IDS[0], [i + 1 for i in found or [num_layers // 2]], num_layers, got=None)
