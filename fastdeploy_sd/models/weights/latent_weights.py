"""The weights of latent attention by role, under DeepSeek's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdeploy_sd.models.attention_config import LatentAttentionConfig
from fastdeploy_sd.models.weights.source import Weights
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix

# Of the norms of latent vectors: the published modelling code's own value, whatever config.json says of others.
LATENT_EPS = 1e-6

Matrix = Callable[[str, int, int], WeightMatrix]  # name, N, K
Vector = Callable[[str, int], Weights]  # name, K


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Of one layer.

    Attributes:
        query_latent: [Lq, H] and the norm f32[Lq] of what it makes; None = queries are made of hidden rows.
        queries: [heads * (key_dim + rotary_dim), Lq or H].
        latent: [latent_dim + rotary_dim, H]; latent_norm: f32[latent_dim].
        keys_and_values: [heads * (key_dim + value_dim), latent_dim]; or two, as llama.cpp's converter makes them:
            [heads * latent_dim, key_dim] and [heads * value_dim, latent_dim].
    """

    config: LatentAttentionConfig
    query_latent: tuple[WeightMatrix, Weights] | None
    queries: WeightMatrix
    latent: WeightMatrix
    latent_norm: Weights
    keys_and_values: WeightMatrix | tuple[WeightMatrix, WeightMatrix]

    @classmethod
    def read(
        cls,
        config: LatentAttentionConfig,
        name: str,
        hidden_size: int,
        matrix: Matrix,
        vector: Vector,
        has: Callable[[str], bool],
    ) -> LatentWeights:
        """Read those whose names begin with `name`; raises as the look-ups do."""
        rank, heads = config.query_latent_dim, config.num_heads
        query_latent, queries = None, f"{name}.q_proj"
        if rank is not None:
            query_latent = matrix(f"{name}.q_a_proj", rank, hidden_size), vector(f"{name}.q_a_layernorm.weight", rank)
            queries = f"{name}.q_b_proj"
        made: WeightMatrix | tuple[WeightMatrix, WeightMatrix]
        if has(f"{name}.k_b_proj"):
            of_keys = matrix(f"{name}.k_b_proj", heads * config.latent_dim, config.key_dim)
            made = of_keys, matrix(f"{name}.v_b_proj", heads * config.value_dim, config.latent_dim)
        else:
            made = matrix(f"{name}.kv_b_proj", heads * (config.key_dim + config.value_dim), config.latent_dim)
        return cls(
            config,
            query_latent,
            matrix(queries, heads * config.query_dim, hidden_size if rank is None else rank),
            matrix(f"{name}.kv_a_proj_with_mqa", config.head_dim, hidden_size),
            vector(f"{name}.kv_a_layernorm.weight", config.latent_dim),
            made,
        )

    @property
    def keys(self) -> Sequence[WeightMatrix]:
        """Of each head [latent_dim, key_dim]: what a query is multiplied with in place of keys.

        Numbers, whatever the file has: blocks and groups lie across them.
        """
        if isinstance(self.keys_and_values, tuple):
            return [matrix.numbers() for matrix in self._of_heads(self.keys_and_values[0], self.config.latent_dim)]
        return [
            WeightMatrix(tuple(_transposed(part) for part in matrix.float_parts()))
            for matrix in self._of_heads(self.keys_and_values, self._made, 0, self.config.key_dim)
        ]

    @property
    def values(self) -> Sequence[WeightMatrix]:
        """Of each head [value_dim, latent_dim], as numbers."""
        if isinstance(self.keys_and_values, tuple):
            return [matrix.numbers() for matrix in self._of_heads(self.keys_and_values[1], self.config.value_dim)]
        made = self._of_heads(self.keys_and_values, self._made, self.config.key_dim, self._made)
        return [matrix.numbers() for matrix in made]

    @property
    def _made(self) -> int:
        """Rows of a head that make its key and its value."""
        return self.config.key_dim + self.config.value_dim

    def _of_heads(self, matrix: WeightMatrix, size: int, first: int = 0, last: int | None = None) -> list[WeightMatrix]:
        """Return of each head, which has `size` rows, those in [first, last)."""
        end = size if last is None else last
        return [matrix.rows([range(h * size + first, h * size + end)]) for h in range(self.config.num_heads)]


def _transposed(part: FloatPart) -> FloatPart:
    return FloatPart(part.name, part.data, not part.is_transposed, place=f"{part.place} transposed")
