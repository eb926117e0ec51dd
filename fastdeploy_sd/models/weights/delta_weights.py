"""The weights of gated delta nets by role, under the names of Qwen3-Next and of Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.models.attention_config import GatedDeltaConfig
from fastdeploy_sd.models.weights.source import Weights, WeightSource
from fastdeploy_sd.models.weights.storages.registry import has_weight, read_weight
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.weight_matrix import WeightMatrix


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """Of one layer, but for its output projection.

    Attributes:
        qkvz: [2 * K + 2 * V, H], rows q | k | v | z.
        beta_and_decay: [2 * Hv, H], rows b | a.
        conv: f32[2 * K + V, width], of q | k | v.
        a_log, dt_bias: f32[Hv]. norm: f32[value_dim].
    """

    qkvz: WeightMatrix
    beta_and_decay: WeightMatrix
    conv: Weights
    a_log: Weights
    dt_bias: Weights
    norm: Weights

    @classmethod
    def read(cls, source: WeightSource, name: str, config: GatedDeltaConfig, hidden_size: int) -> DeltaNetWeights:
        """Read those whose names begin with `name`; raises CheckpointError as WeightSource.tensor."""
        keys, values, heads = config.key_size, config.value_size, config.num_value_heads
        channels = 2 * keys + values

        def matrix(role: str, rows: int) -> WeightMatrix:
            return WeightMatrix((read_weight(source, f"{name}.{role}", (rows, hidden_size)),))

        def vector(role: str, size: int) -> Weights:
            return widen(source.tensor(f"{name}.{role}", (size,)))

        groups = config.num_key_heads
        if has_weight(source, f"{name}.in_proj_qkvz"):
            widths = [config.key_dim, config.key_dim, values // groups, values // groups]
            qkvz = _joined(*split_roles(matrix("in_proj_qkvz", channels + values), groups, widths))
        else:
            qkvz = _joined(matrix("in_proj_qkv", channels), matrix("in_proj_z", values))
        if has_weight(source, f"{name}.in_proj_ba"):
            beta_and_decay = _joined(*split_roles(matrix("in_proj_ba", 2 * heads), groups, [heads // groups] * 2))
        else:
            beta_and_decay = _joined(matrix("in_proj_b", heads), matrix("in_proj_a", heads))
        conv = source.tensor(f"{name}.conv1d.weight", (channels, 1, config.conv_width))
        return cls(
            qkvz,
            beta_and_decay,
            widen(conv).reshape(channels, config.conv_width),
            vector("A_log", heads),
            vector("dt_bias", heads),
            vector("norm.weight", config.value_dim),
        )


def split_roles(matrix: WeightMatrix, num_groups: int, widths: Sequence[int]) -> list[WeightMatrix]:
    """Return the rows of each role, of a matrix where those of all roles lie together for each of num_groups.

    `widths`: rows of each role in a group.
    """
    size, first, found = sum(widths), 0, list[WeightMatrix]()
    for width in widths:
        found.append(matrix.rows([range(g * size + first, g * size + first + width) for g in range(num_groups)]))
        first += width
    return found


def _joined(*matrices: WeightMatrix) -> WeightMatrix:
    return WeightMatrix(tuple(part for matrix in matrices for part in matrix.parts))
