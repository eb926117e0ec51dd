"""Undoes what llama.cpp's converter does to tensors: orders of rows and columns, and decays in place of logarithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.source import Weights
from fastdeploy_sd.ops.bf16 import widen

# From a tensor as it is stored to that of Hugging Face; the text names the tensor in a CheckpointError.
Change = Callable[[Weights, str], Weights]


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of gated delta nets; stored are the first value heads of all key heads, then the second ones, ..."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    def changes(self) -> Mapping[str, Change]:
        """Return what brings value heads that share a key head together again, by a tensor's name in its layer."""
        if self.num_key_heads == self.num_value_heads:
            return {}
        first = 2 * self.num_key_heads * self.key_dim
        return {
            **dict.fromkeys(("attn_qkv", "ssm_conv1d"), self._in_groups(first, self.value_dim)),
            "attn_gate": self._in_groups(0, self.value_dim),
            **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), self._in_groups(0, 1)),
        }

    def columns(self) -> tuple[range, ...]:
        """Return the stored columns of each head in order, of a matrix over what the heads return."""
        keys, width = self.num_key_heads, self.value_dim
        sharing = self.num_value_heads // keys
        stored = (i * keys + key for key in range(keys) for i in range(sharing)) if sharing > 1 else ()
        return tuple(range(head * width, (head + 1) * width) for head in stored)

    def _in_groups(self, first: int, width: int) -> Change:
        """Of rows that heads have, `width` each, from one row on."""

        def change(data: Weights, where: str) -> Weights:
            num_rows = first + self.num_value_heads * width
            if len(data) != num_rows:
                raise CheckpointError(f"{where}: expected {num_rows} rows, got {len(data)}")
            heads = data[first:].reshape(-1, self.num_key_heads, width, *data.shape[1:]).swapaxes(0, 1)
            return np.concatenate([data[:first], heads.reshape(-1, *data.shape[1:])])

        return change


def halves(num_heads: int) -> Change:
    """Of rows of heads in pairs (i, i + half): the first halves of each head, then the second ones."""

    def change(data: Weights, where: str) -> Weights:
        if len(data) % (2 * num_heads):
            expected = f"an even number of rows for each of {num_heads} heads"
            raise CheckpointError(f"{where}: expected {expected}, got {len(data)}")
        return data.reshape(num_heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)

    return change


def decay_logarithms(data: Weights, where: str) -> Weights:
    """-exp(A_log) -> A_log, within one rounding of each of them."""
    numbers = widen(data).astype(np.float64)
    if not (numbers < 0).all():
        raise CheckpointError(f"{where}: expected numbers below 0, got others")
    return np.log(-numbers).astype(np.float32)


def both(first: Change, second: Change | None) -> Change:
    """Return one change after another."""
    return first if second is None else lambda data, where: second(first(data, where), where)
