"""Finds a whole decoder's weights by role; those of its layers as layer_weights.py says."""

from __future__ import annotations

import re

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.weights.layer_weights import LayerWeights
from fastdeploy_sd.models.weights.source import Weights, WeightSource
from fastdeploy_sd.models.weights.storages.registry import read_weight
from fastdeploy_sd.ops.weight_matrix import WeightMatrix, WeightPart

# The last one is of models for text and pictures.
_ROOTS = ("model", "ernie", "model.language_model")
# Of weights and biases.
_SUFFIXES = (".weight", ".bias", ".qweight", ".weight_packed")


class DecoderWeights(LayerWeights):
    """Weights of one whole decoder by role; raises as LayerWeights."""

    def __init__(self, source: WeightSource, config: DecoderConfig) -> None:
        roots = [root for root in _ROOTS if f"{root}.embed_tokens.weight" in source]
        if not roots:
            raise CheckpointError(
                f"{source.path}: expected {' or '.join(f'{root}.embed_tokens.weight' for root in _ROOTS)}, found none"
            )
        super().__init__(source, config, f"{roots[0]}.layers")
        self._root = roots[0]
        self._embedding_name = f"{self._root}.embed_tokens.weight"

    def embedding(self) -> WeightPart:
        """Return [V, H]."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        return read_weight(self._source, self._embedding_name.removesuffix(".weight"), shape)

    def lm_head(self) -> WeightMatrix:
        """Return [V, H]; the embedding when the model ties them."""
        if self._config.tie_word_embeddings:
            return WeightMatrix((self.embedding(),))
        return self._matrix("lm_head", self._config.vocab_size, self._config.hidden_size)

    def final_norm(self) -> Weights:
        """Return f32[H]."""
        return self._norm_weight(f"{self._root}.norm", self._config.hidden_size)

    def verify(self) -> None:
        """Look up every tensor of the decoder, and weights of it that would not be used.

        A bias or a layer that config.json does not mention belongs to another model than the one it describes. Raises
        CheckpointError: a tensor is missing, has another shape, or would not be used.
        """
        for look_up in (self.embedding, self.lm_head, self.final_norm):
            look_up()
        for layer in range(self._config.num_layers):
            self.verify_layer(layer)
        unused = [name for name in self._source.unread() if self._is_of_decoder(name)]
        if unused:
            names = ", ".join(map(shown, unused[:3]))
            raise CheckpointError(
                f"{self._source.path}: expected no tensor beyond those that config.json tells of, got"
                f" {len(unused)} more: {names}"
            )

    def _is_of_decoder(self, name: str) -> bool:
        if not name.endswith(_SUFFIXES):
            return False  # as tables of old files, or scales of a quantised KV cache
        if name.endswith(".bias") and not self._source.tensor(name, self._source.shape(name)).any():
            return False  # GPTQ's tools write one of zeros for every linear layer
        if name.startswith("lm_head."):
            return name != "lm_head.weight" or not self._config.tie_word_embeddings
        match = re.match(rf"{self._prefix}\.(\d+)\.", name)
        # Layers with a projection over two rows are draft layers, which some releases number after the decoder's.
        return match is not None and f"{self._prefix}.{match[1]}.eh_proj.weight" not in self._source
