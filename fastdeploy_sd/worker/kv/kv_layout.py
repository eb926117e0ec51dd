"""The KV groups of a model's layers, and which of them share memory. Needs no Paddle, so it works before a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdeploy_sd.config import Config, SchedulerConfig
from fastdeploy_sd.types.kv_groups import KvGroup
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv, block_bytes


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV groups of a model.

    Blocks of all groups come from one pool, so they have the same size. Layers of full attention are one kind, layers
    with the same window another. The kind with the fewest layers sets the number of layers per group; the others are
    split into groups of that size. With 4 layers of full attention and 10 windows of one size:

        group 0   f f f f          group 1   w w w w
                                   group 2   w w w w
                                   group 3   w w . .      padding

    A group whose layers are smaller holds more tokens per block.

    Attributes:
        members: per group, the numbers of its layers.
        block_bytes: of a block of any group.
        why_kept: why the blocks before a window are kept all the same; "" = they are not, or there is no window.
    """

    groups: tuple[KvGroup, ...]
    members: tuple[tuple[int, ...], ...]
    block_bytes: int
    why_kept: str = ""

    @classmethod
    def of_model(
        cls, layers: Sequence[LayerKv], fmt: KvCacheFormat, config: Config, *, has_drafts: bool, on_gpu: bool
    ) -> KvLayout:
        """Group the layers of a model, and those of its draft models: one group where blocks must be the same."""
        plain = [replace(layer, window=None) for layer in layers]
        reasons = {
            "swap_space or splitwise_role copies KV": config.copies_kv,
            "a draft model shares them": has_drafts,
            "the device is a GPU": on_gpu,
            "the layers have other heads": len(set(plain)) > 1,
        }
        why_kept = ", ".join(reason for reason, holds in reasons.items() if holds) if plain != list(layers) else ""
        return replace(cls.create(plain if why_kept else layers, fmt, config.scheduler), why_kept=why_kept)

    @classmethod
    def create(cls, layers: Sequence[LayerKv], fmt: KvCacheFormat, limits: SchedulerConfig) -> KvLayout:
        """Group the layers by their windows."""
        max_step_tokens = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        kinds: dict[int | None, list[int]] = {}
        for i, layer in sorted(enumerate(layers), key=lambda item: item[1].window is not None):
            kinds.setdefault(layer.window, []).append(i)
        size = min(map(len, kinds.values()))
        members = [(w, tuple(k[i : i + size])) for w, k in kinds.items() for i in range(0, len(k), size)]
        sizes = [block_bytes([layers[i] for i in numbers], fmt) for _, numbers in members]
        largest = max(sizes)
        groups = [
            KvGroup(fmt.block_size << (largest // own).bit_length() - 1, window, max_step_tokens)
            for (window, _), own in zip(members, sizes, strict=True)
        ]
        return cls(tuple(groups), tuple(numbers for _, numbers in members), largest)
