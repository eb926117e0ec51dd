"""The KV groups of a model's layers, and which of them share memory. Needs no Paddle, so it works before a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.types.kv_groups import KvGroup
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv, block_bytes


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV groups of a model.

    Blocks of all groups come from one pool, so they have the same size. Layers of full attention are one kind, layers
    with the same window another. The kind with the fewest layers sets the number of layers per group; the others are
    split into groups of that size. Draft layers are in the first group besides. With 4 layers of full attention, 10
    windows of one size and a draft layer:

        group 0   f f f f d        group 1   w w w w .
                                   group 2   w w w w .
                                   group 3   w w . . .      padding

    Attributes:
        members: per group, the numbers of its layers; the first group has the most.
        block_bytes: of a block of any group.
        why_kept: why the blocks before a window are kept all the same; "" = they are not, or there is no window.
    """

    groups: tuple[KvGroup, ...]
    members: tuple[tuple[int, ...], ...]
    block_bytes: int
    why_kept: str = ""

    @classmethod
    def of_model(
        cls, layers: Sequence[LayerKv], drafts: Sequence[LayerKv], fmt: KvCacheFormat, config: Config
    ) -> KvLayout:
        """Group the layers of a model, with those of its draft models: one group where blocks must be the same."""
        plain = [replace(layer, window=None) for layer in layers]
        has_full_draft = any(layer.window is None for layer in drafts)
        reasons = {
            "splitwise_role and swap_space both copy KV": config.splitwise.splitwise_role != "mixed"
            and config.cache.swap_bytes > 0,
            "draft layers without a window share them": has_full_draft and all(layer.window for layer in layers),
            "the layers have other heads": len(set(plain)) > 1,
        }
        why_kept = ", ".join(reason for reason, holds in reasons.items() if holds) if plain != list(layers) else ""
        return replace(cls.create(plain if why_kept else layers, drafts, fmt, config), why_kept=why_kept)

    @classmethod
    def create(
        cls, layers: Sequence[LayerKv], drafts: Sequence[LayerKv], fmt: KvCacheFormat, config: Config
    ) -> KvLayout:
        """Group the layers by their windows. Draft layers have the numbers after them."""
        scheduler = config.scheduler
        max_step_tokens = scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
        kinds: dict[int | None, list[int]] = {}
        for i, layer in sorted(enumerate(layers), key=lambda item: item[1].window is not None):
            kinds.setdefault(layer.window, []).append(i)
        size = min(map(len, kinds.values()))
        members = [(w, tuple(k[i : i + size])) for w, k in kinds.items() for i in range(0, len(k), size)]
        groups = [KvGroup(fmt.block_size, window, max_step_tokens) for window, _ in members]
        window, first = members[0]
        if drafts and window is not None:
            # They are computed later than the target's, see `spec_decode.model_based.proposer`.
            widest = max([window, *(layer.window or 0 for layer in drafts)])
            groups[0] = replace(groups[0], window=widest + fmt.block_size + config.speculative.num_speculative_tokens)
        of_groups = (first + tuple(range(len(layers), len(layers) + len(drafts))), *(ids for _, ids in members[1:]))
        return cls(tuple(groups), of_groups, block_bytes([*(layers[i] for i in first), *drafts], fmt))
