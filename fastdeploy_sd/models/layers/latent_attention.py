"""Self-attention over one layer's paged cache of latent vectors, which are the keys and the values of all heads.

A head's keys and values are products of the latent vector. In place of making them, the query is multiplied with the
matrix that would make keys, and what the weights sum of latent vectors with the one that would make values. Prompts,
drafts and single tokens are computed in this one form, so their rows have the same bits.

Source: arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable

from paddle import Tensor

from fastdeploy_sd.models.attention_config import LatentAttentionConfig
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.linear import AdaptedLayer
from fastdeploy_sd.ops.attention import cascade_append_attention, rope_store_latent_
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.linear import head_linear
from fastdeploy_sd.ops.packing import PackedExperts
from fastdeploy_sd.ops.rowwise import concat_columns

# x [T, K] -> normalised rows, and x as float32
Norm = Callable[[Tensor], tuple[Tensor, Tensor]]


class LatentAttention:
    """Project, rotate, store latent vectors, attend, project back.

    Args:
        query_latent: makes what `queries` reads, None = that is the hidden row.
        queries: [T, Hq * (key_dim + rotary_dim)]
        latent, latent_norm, rotary_key: [T, latent_dim], [T, rotary_dim]
        keys, values: of each head [latent_dim, key_dim] and [value_dim, latent_dim].
    """

    def __init__(  # noqa: PLR0913, PLR0917 (it is one layer)
        self,
        query_latent: tuple[AdaptedLayer, Norm] | None,
        queries: AdaptedLayer,
        latent: AdaptedLayer,
        latent_norm: Norm,
        rotary_key: AdaptedLayer,
        keys: PackedExperts[Tensor],
        values: PackedExperts[Tensor],
        output: AdaptedLayer,
        config: LatentAttentionConfig,
    ) -> None:
        self._query_latent, self._queries = query_latent, queries
        self._latent, self._latent_norm, self._rotary_key = latent, latent_norm, rotary_key
        self._keys, self._values, self._output = keys, values, output
        self._rope, self._scale = config.rope, config.scale

    def __call__(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of the wanted rows; writes the T new tokens' latent vectors."""
        q = self.store_kv(x, cache, inputs)
        if inputs.outputs is not None:
            q = gather_output_rows(q, inputs.outputs.indices)
        y = cascade_append_attention(
            q,
            cache,
            inputs.wanted_start_loc,
            inputs.seq_lens,
            inputs.maps_of(cache).blocks,
            self._scale,
            inputs.prefixes(cache, q.shape[1] // cache.head_dim),
            inputs.tree_mask,
        )
        values = head_linear(y, self._values, self._rope.rotary_dim, passes=False)
        return self._output(values, slots=inputs.adapter_slots)

    def store_kv(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> q [T, Hq * D] as latent vectors meet it; writes the T new tokens' latent vectors."""
        read, adapters = x, inputs.adapter_slots
        if self._query_latent is not None:
            project, norm = self._query_latent
            read, _ = norm(project(x, slots=adapters))
        heads = head_linear(self._queries(read, slots=adapters), self._keys, self._rope.rotary_dim, passes=True)
        latent, _ = self._latent_norm(self._latent(x, slots=adapters))
        latents = concat_columns(latent, self._rotary_key(x, slots=adapters))
        slots, rotary = inputs.maps_of(cache).slot_mapping, inputs.rotary[self._rope]
        q = rope_store_latent_(heads, latents, cache, inputs.positions, slots, rotary)
        if inputs.on_stored is not None:
            inputs.on_stored(cache, inputs)
        return q
