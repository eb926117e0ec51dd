"""The size of the memory of recurrent states. Needs no Paddle, so it works before a load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.attention_config import GatedDeltaConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard
from fastdeploy_sd.worker.kv.kv_file import ALIGNMENT

_GIB, _MIB = 1 << 30, 1 << 20
# Of snapshots where no option sets their number: at most so many per request, and so much of the room for KV.
_PER_REQUEST, _SHARE = 4, 0.25
_NUM_TENSORS = 3  # of a layer, see DeltaMemory


@dataclass(frozen=True, slots=True)
class NetShape:
    """One rank's part of a gated delta net's memory; see ops.delta_memory.

    Attributes:
        heads: the model's value heads that the rank has.
        columns: of the model's rows q | k | v, the rank's of q, of k and of v.
    """

    heads: range
    key_dim: int
    value_dim: int
    columns: tuple[range, range, range]
    conv_width: int

    @classmethod
    def of_rank(cls, config: DecoderConfig, net: GatedDeltaConfig, shard: Shard) -> NetShape:
        """Return the shape of what a rank has; raises ConfigError as DecoderShard."""
        own = DecoderShard(config, shard)
        return cls(own.heads(net), net.key_dim, net.value_dim, own.qkvz(net)[:3], net.conv_width)

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return sum(map(len, self.columns))

    def slot_bytes(self, item: int) -> int:
        """Bytes of a state with the rows that its convolution still reads; `item`: of an activation."""
        state = self.num_heads * self.key_dim * self.value_dim * np.dtype(np.float32).itemsize
        return state + (self.conv_width - 1) * self.num_channels * item

    @property
    def row_size(self) -> int:
        """Elements that are kept of a draft."""
        return self.num_channels + 2 * self.num_heads


@dataclass(frozen=True, slots=True)
class StateSize:
    """How many states are kept.

    Attributes:
        num_rows: live states, one for each row of the request table.
        num_drafts: rows that are kept of each request's last step.
        request_bytes, snapshot_bytes: of a live state with its drafts, and of a snapshot, over all ranks.
    """

    num_rows: int
    num_snapshots: int
    num_drafts: int
    request_bytes: int
    snapshot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.request_bytes + self.num_snapshots * self.snapshot_bytes

    def verify_room(self, num_bytes: int) -> None:
        """Verify that so much free memory holds them. Raises ConfigError: it does not."""
        if self.num_bytes > num_bytes:
            raise ConfigError(
                f"num_state_snapshots, max_num_seqs: expected what the system has memory for,"
                f" {num_bytes / _GIB:.2f} GiB, got {self.describe()}",
                param="num_state_snapshots",
            )

    def describe(self) -> str:
        """Return a line for users."""
        return (
            f"{self.num_rows} requests of {self.request_bytes / _MIB:.2f} MiB each and {self.num_snapshots} snapshots,"
            f" {self.num_bytes / _GIB:.2f} GiB when all are in use"
        )


def state_size(config: Config, decoder: DecoderConfig, room: Callable[[], int], num_ranks: int = 1) -> StateSize | None:
    """Return the size of the states of a decoder's layers, None where they have none.

    `room`: bytes that KV could take. Raises ConfigError: as DecoderShard.
    """
    if not decoder.delta_nets:
        return None
    cache, num_rows, item = config.cache, config.scheduler.max_num_seqs, storage(config.model.dtype).itemsize
    # The newest token is kept with the drafts where a step may have to be repeated.
    num_drafts = config.speculative.num_speculative_tokens + 1
    shapes = [shape for rank in range(num_ranks) for shape in _shapes(decoder, rank, num_ranks)]
    slot = sum(shape.slot_bytes(item) for shape in shapes)
    request = slot + num_drafts * item * sum(shape.row_size for shape in shapes)
    count = cache.num_state_snapshots
    if not cache.enable_prefix_caching:
        count = 0
    elif count is None:
        count = min(_PER_REQUEST * num_rows, int(room() * _SHARE) // slot)
    return StateSize(num_rows, count, num_drafts, request, slot)


def state_bytes(config: Config, decoder: DecoderConfig, size: StateSize | None, num_ranks: int) -> list[int]:
    """Return the bytes of the states of each rank, each tensor rounded up as in a KvFile; [] = there are none."""
    if size is None:
        return []
    item, num_slots = storage(config.model.dtype).itemsize, size.num_rows + size.num_snapshots
    return [
        sum(
            num_slots * shape.slot_bytes(item)
            + size.num_rows * size.num_drafts * item * shape.row_size
            + _NUM_TENSORS * ALIGNMENT
            for shape in _shapes(decoder, rank, num_ranks)
        )
        for rank in range(num_ranks)
    ]


def _shapes(decoder: DecoderConfig, rank: int, num_ranks: int) -> list[NetShape]:
    shard = Shard(rank, num_ranks) if num_ranks > 1 else WHOLE_MODEL
    return [NetShape.of_rank(decoder, net, shard) for net in decoder.delta_nets]


def verify_state_options(config: Config, decoder: DecoderConfig) -> None:
    """Refuse what layers with recurrent states cannot do, and their option for models without such layers.

    Raises ConfigError: it names the option.
    """
    if not decoder.delta_nets:
        count = config.cache.num_state_snapshots
        if count is not None:
            text = f"num_state_snapshots: expected none for a model without recurrent states, got {count}"
            raise ConfigError(text, param="num_state_snapshots")
        return
    kind = "a model with recurrent states (config.json: linear_num_value_heads)"
    if config.speculative.draft_trees:
        raise ConfigError(
            f"speculative_config.draft_trees: expected false, as a state follows one text, of {kind}, got true",
            param="speculative_config",
        )
    role, cache = config.splitwise.splitwise_role, config.cache
    if role != "mixed" and not (cache.enable_prefix_caching and cache.num_state_snapshots != 0):
        name = "num_state_snapshots" if cache.enable_prefix_caching else "enable_prefix_caching"
        raise ConfigError(
            f"{name}: expected room for states that are sent, with splitwise_role {role} for {kind}, got"
            f" {getattr(cache, name)}",
            param=name,
        )
    if role != "mixed" and cache.swap_bytes:
        raise ConfigError(
            f"swap_space: expected none with splitwise_role {role} for {kind}, got {cache.swap_space:g}",
            param="swap_space",
        )
