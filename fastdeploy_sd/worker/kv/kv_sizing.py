"""The size and number of KV blocks, and the layers that share them. Needs no Paddle, so it works before a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.attention_config import AnyAttention, LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.types.kv_groups import KvGroup, most_blocks, most_tokens
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard

_SCALE_BYTES = 4
_GIB = 1 << 30
# The other half is for activations, for packed weights that are mapped but not read yet, and for other programs.
_SHARE_OF_FREE = 0.5
_WHOLE = 10  # from so many requests on, no fraction is shown


@dataclass(frozen=True, slots=True)
class KvCacheFormat:
    """The storage types of a token's keys, values and hidden rows.

    Attributes:
        dtype: "float32", "bfloat16" or "float16", of the activations and of the hidden rows that draft layers keep.
        kv: "int8" or "fp8": keys and values are such bytes, with a float32 scale per token and KV head each; "auto":
            they have `dtype`.
    """

    block_size: int
    dtype: str
    kv: Literal["auto", "int8", "fp8"] = "auto"

    @classmethod
    def create(cls, config: Config) -> KvCacheFormat:
        """Return the format of `--block-size`, `--dtype` and `--kv-cache-dtype`."""
        return cls(config.cache.block_size, config.model.dtype, config.cache.kv_cache_dtype)

    @property
    def has_scales(self) -> bool:
        """Whether keys and values are bytes with scales."""
        return self.kv != "auto"

    @property
    def kv_dtype(self) -> str:
        """Type of keys and values: `dtype`, "int8" or "fp8"."""
        return self.kv if self.has_scales else self.dtype

    @property
    def row_storage(self) -> npt.DTypeLike:
        """NumPy type that holds elements of `dtype`; bfloat16 as its bits."""
        return storage(self.dtype)

    @property
    def kv_storage(self) -> npt.DTypeLike:
        """The same of keys and values."""
        return {"int8": np.int8, "fp8": np.uint8}.get(self.kv, self.row_storage)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps in every block. The layers of a model and its draft layers may differ.

    Attributes:
        num_kv_heads, head_dim: of its keys and, where `has_values`, of its values. Else the keys are the values.
        first_key: position of the first token with a key in this layer; no token before it is attended to.
        hidden_size: length of the kept hidden row of each block's last token; 0 = none is kept.
        window: see AttentionConfig.
    """

    num_kv_heads: int
    head_dim: int
    first_key: int = 0
    hidden_size: int = 0
    window: int | None = None
    has_values: bool = True

    @staticmethod
    def of_decoder(config: DecoderConfig, shard: Shard = WHOLE_MODEL) -> list[LayerKv]:
        """Return what the layers of a decoder that have KV keep on a rank."""
        return [replace(_plain(config, own, shard), window=own.window) for own in config.attentions]

    @staticmethod
    def of_draft_layers(
        config: DecoderConfig,
        num_layers: int,
        shard: Shard = WHOLE_MODEL,
        *,
        reads_hidden: bool = True,
        per_draft: int = 1,
    ) -> list[LayerKv]:
        """Return what the layers of a draft model keep on a rank.

        Args:
            reads_hidden: whether they read the target's hidden rows. Then the first key of the layers of draft j is
                that of token j + 1, the first that they can run for. Else they may run for any earlier token late, so
                that none of their blocks can be given back.
            per_draft: layers that make a draft one after another; the first of them reads hidden rows.
        """
        layers = config.attentions[:num_layers]
        plain = [_plain(config, layer, shard) for layer in layers]
        if not reads_hidden:
            return plain
        return [
            replace(
                kept,
                first_key=j // per_draft + 1,
                hidden_size=0 if j % per_draft else config.hidden_size,
                window=layer.window,
            )
            for j, (kept, layer) in enumerate(zip(plain, layers, strict=True))
        ]


def _plain(config: DecoderConfig, attention: AnyAttention, shard: Shard) -> LayerKv:
    """Return what a layer keeps on a rank, of all tokens."""
    num_kv_heads = len(DecoderShard(config, shard).kv_heads(attention))
    return LayerKv(num_kv_heads, attention.head_dim, has_values=not isinstance(attention, LatentAttentionConfig))


@dataclass(frozen=True, slots=True)
class KvCacheSize:
    """The number of blocks, and its reason.

    Attributes:
        block_bytes: of one block over all layers of a KV group.
        reason: what the number follows from, as text for users.
        groups: see KvLayout.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str
    groups: tuple[KvGroup, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request that fits into all blocks."""
        return most_tokens(self.groups, self.num_blocks)

    @property
    def token_bytes(self) -> int:
        """Bytes that each further token of a long request takes; windows have all of theirs by then."""
        return sum(group.window is None for group in self.groups) * self.block_bytes // self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    def describe(self, max_request_tokens: int) -> str:
        """Return a line about the size; `max_request_tokens` is the length of the longest request."""
        together = self.num_tokens / max_request_tokens
        count = f"{together:.2g}" if together < _WHOLE else str(int(together))
        return (
            f"{self.num_tokens} tokens in {self.num_blocks} blocks of {self.block_size},"
            f" {self.num_bytes / _GIB:.2f} GiB when all are in use ({self.reason});"
            f" room for {count} requests of {max_request_tokens} tokens"
        )

    def shortage(self, free_bytes: int, num_engines: int = 1) -> str | None:
        """Return a line about missing memory, None where all blocks of so many engines fit into the free memory."""
        if self.num_bytes * num_engines <= free_bytes:
            return None
        each = f" in each of {num_engines} engines" if num_engines > 1 else ""
        return (
            f"the KV cache may take {self.num_bytes / _GIB:.2f} GiB ({self.reason}){each}, but"
            f" {free_bytes / _GIB:.2f} GiB of memory are free: the system may end the server when more is in use"
        )


def block_bytes(layers: Iterable[LayerKv], fmt: KvCacheFormat) -> int:
    """Return the bytes of one block over these layers: keys, values, their scales, and hidden rows."""
    kv_bytes, row_bytes = np.dtype(fmt.kv_storage).itemsize, np.dtype(fmt.row_storage).itemsize
    scale_bytes = _SCALE_BYTES if fmt.has_scales else 0
    return sum(
        (1 + layer.has_values) * layer.num_kv_heads * fmt.block_size * (layer.head_dim * kv_bytes + scale_bytes)
        + layer.hidden_size * row_bytes
        for layer in layers
    )


def max_model_len(config: Config, decoder_config: DecoderConfig) -> int:
    """Return the configured length, else the checkpoint's.

    Raises ConfigError: the configured one is longer than the checkpoint's.
    """
    length = config.model.max_model_len or decoder_config.max_position
    if length > decoder_config.max_position:
        raise ConfigError(
            f"max_model_len: expected at most the checkpoint's {decoder_config.max_position}, got {length}",
            param="max_model_len",
        )
    return length


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Memory that KV blocks may take where no option sets it.

    Attributes:
        num_bytes: for the blocks of all ranks.
        reason: what that follows from, as text for users.
        option: named by an error about too little memory.
        takes_all: whether all of it is taken, for the prefix cache, or only what running requests can use.
    """

    num_bytes: int
    reason: str
    option: str = "kv_cache_memory_gb"
    takes_all: bool = False


def half_of(free_bytes: int, num_engines: int = 1, taken: int = 0) -> KvRoom:
    """Return the room of one of so many engines in main memory with so many free bytes, of which each takes some."""
    free_bytes = max(0, free_bytes - num_engines * taken)
    among = f", among {num_engines} engines" if num_engines > 1 else ""
    reason = f"half of the {free_bytes / _GIB:.2f} GiB that are free{among}"
    return KvRoom(int(free_bytes * _SHARE_OF_FREE / num_engines), reason)


def choose_size(
    config: Config,
    one_block: int,
    max_model_len: int,
    room: Callable[[], KvRoom],
    groups: tuple[KvGroup, ...] = (),
) -> KvCacheSize:
    """Return the configured size, else all that fits in `room`, or what requests can use.

    `groups`: see KvLayout; () = one of full attention. Raises ConfigError: not even one block fits, or a configured
    `max_model_len` does not.
    """
    cache, option = config.cache, "kv_cache_memory_gb"
    groups = groups or (KvGroup(cache.block_size),)
    if cache.num_blocks is not None:
        return KvCacheSize(cache.num_blocks, cache.block_size, one_block, "num_gpu_blocks_override", groups)
    if cache.kv_cache_memory_gb is not None:
        count, reason = (
            int(cache.kv_cache_memory_gb * _GIB) // one_block,
            f"kv_cache_memory_gb {cache.kv_cache_memory_gb:g}",
        )
    else:
        found = room()
        option = found.option
        useful, count = most_blocks(groups, max_model_len), found.num_bytes // one_block
        reason = found.reason
        if config.scheduler.max_num_seqs * useful <= count and not found.takes_all:
            count = config.scheduler.max_num_seqs * useful
            reason = f"max_num_seqs {config.scheduler.max_num_seqs} x {max_model_len} tokens"
    if count < 1:
        least = f"{one_block / _GIB:.3f}"
        expected = f"at least {least} (one block)"
        if option != "kv_cache_memory_gb":
            expected = f"what leaves memory for a KV block, {least} GiB"
        raise ConfigError(f"{option}: expected {expected}, got {reason}", param=option)
    wanted = config.model.max_model_len
    longest = most_tokens(groups, count) + 1
    if wanted is not None and longest < wanted:
        needed = most_blocks(groups, wanted - 1) * one_block / _GIB
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the tokens of one request that the KV"
            f" cache holds ({reason}), got {wanted}, which takes kv_cache_memory_gb {needed:.3f}",
            param="max_model_len",
        )
    return KvCacheSize(count, cache.block_size, one_block, reason, groups)
