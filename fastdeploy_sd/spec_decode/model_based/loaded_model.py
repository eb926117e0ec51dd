"""What the worker has loaded for a method that runs a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdeploy_sd.types.draft_methods import DraftMethod

if TYPE_CHECKING:
    from paddle import Tensor

    from fastdeploy_sd.models.draft_model import DraftModel
    from fastdeploy_sd.models.rope_config import RopeConfig
    from fastdeploy_sd.ops.kv_cache import KvCache, Rotary
    from fastdeploy_sd.ops.mtp_batch import HiddenStateBuffer


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDraftModel:
    """A draft model with its KV over the target's blocks.

    Attributes:
        caches: one KV cache per draft layer; layer j's first_key is j + 1.
        kept_hidden: per hidden source: the target, then every draft layer but the last; () where the model reads only
            token ids. A block's row is valid as long as its KV. A request's are those of its newest block and drafts.
        hidden: [T, H], the target's rows of the step after its final norm, for the largest step.
        token_table, block_table: i32[max_num_seqs, max_model_len], i32[max_num_seqs, max_blocks], the request table's.
        enforce_eager: run the ops one by one instead of replaying a recording.
        agree: called before the method's state changes; raises when another rank failed.
        step: the device's columns of a step, by their names in StepMemory; None = nothing is drafted ahead.
    """

    method: DraftMethod
    model: DraftModel
    caches: Sequence[KvCache[Tensor]]
    rotary: Mapping[RopeConfig | None, Rotary[Tensor]]
    kept_hidden: Sequence[HiddenStateBuffer[Tensor]]
    hidden: Tensor
    token_table: Any
    block_table: Any
    enforce_eager: bool = False
    agree: Callable[[], None] = lambda: None
    step: Mapping[str, Any] | None = None
