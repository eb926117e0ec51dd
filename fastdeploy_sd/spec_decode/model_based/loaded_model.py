"""What the worker has loaded for a method that runs a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_sd.types import I32
from fastdeploy_sd.types.draft_methods import DraftMethod

if TYPE_CHECKING:
    from paddle import Tensor

    from fastdeploy_sd.models.drafters.draft_model import DraftModel
    from fastdeploy_sd.models.rope_config import RopeConfig
    from fastdeploy_sd.ops.kv_cache import KvCache, Rotary
    from fastdeploy_sd.ops.mtp_batch import HiddenStateBuffer


NO_LIMIT = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDraftModel:
    """A draft model with its KV over the target's blocks.

    Attributes:
        caches: one KV cache per layer with one; layer j's first_key is j + 1 where it reads hidden rows.
        block_size: of the target's KV blocks, which these caches share.
        kept_hidden: per hidden source: the target, then every draft layer but the last. A block's row is valid as long
            as its KV. A request's are those of its newest block and drafts. A model that reads only token ids has one
            source of rows without width; one without KV reads rows of the step only, and has one source without blocks.
        hidden: [T, H], what the model reads of the target's rows of the step, for the largest step; likewise.
        token_table, block_table: i32[max_num_seqs, max_model_len], i32[max_num_seqs, max_blocks], the request table's.
        host_blocks: the latter on the host.
        max_position: of its tokens, at most.
        vocab_size: of the ids that it knows.
        enforce_eager: run the ops one by one instead of replaying a recording.
        agree: called before the method's state changes; raises when another rank failed.
        step: the device's columns of a step, by their names in StepMemory; None = nothing is drafted ahead.
    """

    method: DraftMethod
    model: DraftModel
    caches: Sequence[KvCache[Tensor]]
    block_size: int
    rotary: Mapping[RopeConfig | None, Rotary[Tensor]]
    kept_hidden: Sequence[HiddenStateBuffer[Tensor]]
    hidden: Tensor
    token_table: Any
    block_table: Any
    host_blocks: I32
    max_position: int
    vocab_size: int
    enforce_eager: bool = False
    agree: Callable[[], None] = lambda: None
    step: Mapping[str, Any] | None = None

    @property
    def max_filled(self) -> int:
        """Slots that a step fills at most: a model that reads only token ids may have many to catch up with."""
        return NO_LIMIT if self.method.reads_hidden else int(self.hidden.shape[0])

    @property
    def num_newest(self) -> int:
        """Slots that a request needs at most: a model without KV has no use for earlier ones."""
        return NO_LIMIT if self.caches else 1

    @property
    def num_more(self) -> int:
        """Slots that drafts need besides those of a draft after the other: for rows that run apart."""
        block = self.model.block
        return 0 if block is None or not block.is_apart else block.more_rows + 1

    @property
    def fills_in_time(self) -> bool:
        """Whether slots must be filled while the hidden rows that they follow from are kept."""
        return self.method.reads_hidden and bool(self.caches)
