"""The arrays of a step that a forward pass reads: their sizes, and what pads them on a device."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.device.program.program import Padding
from fastdeploy_sd.device.program.recorder import Size
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.types import I32

SHAPES = {
    "input_ids": Size("num_tokens"),
    "positions": Size("num_tokens"),
    "slot_mapping": Size("num_tokens"),
    "tree_mask": Size("num_tokens"),
    "query_start_loc": Size("num_requests") + 1,
    "seq_lens": Size("num_requests"),
    "table_rows": Size("num_requests"),
    "logits_indices": Size("num_logits"),
}
# Of DeltaStates, after the table rows.
STATES = ("state_source", "num_replayed", "num_certain", "cu_snapshots", "snapshot_ends", "snapshot_slots")
STATE_SHAPES = {
    **dict.fromkeys(("state_source", "num_replayed", "num_certain"), Size("num_requests")),
    "cu_snapshots": Size("num_requests") + 1,
}
# Of models that run with LoRA adapters.
ADAPTER_SHAPES = {"adapter_slots": Size("num_tokens")}
# Further inputs that are corrected where a step begins before the host knows the tokens of the one before it.
RESOLVED_SHAPES = {
    "num_computed": Size("num_requests"),
    "output_positions": Size("num_logits"),
    "cu_num_logits": Size("num_requests") + 1,
    "cu_num_draft": Size("num_requests") + 1,
}
RESOLVED = (
    "input_ids", "positions", "slot_mapping", "num_computed", "seq_lens", "output_positions", "draft_token_ids",
)  # fmt: skip
# Padding of rows after a step's own, where a device rounds sizes up: they belong to no request and write nothing.
PADDING: Padding = {
    **dict.fromkeys(SHAPES | RESOLVED_SHAPES | STATE_SHAPES, 0),
    **dict.fromkeys(("query_start_loc", "cu_num_logits", "cu_num_draft", "cu_snapshots"), "last"),
    "slot_mapping": -1,
    "adapter_slots": -1,
}


def block_table_names(num_groups: int) -> list[str]:
    """Return the input with each KV group's blocks."""
    return ["block_tables", *(f"block_tables_{g}" for g in range(1, num_groups))]


def input_arrays(memory: StepMemory, block_tables: Sequence[I32]) -> dict[str, Array]:
    """Return the whole input arrays of the pass."""
    arrays: dict[str, Array] = {name: getattr(memory, name) for name in SHAPES}
    if memory.limits.num_request_drafts <= 1:
        del arrays["tree_mask"]  # nothing branches
    if memory.has_states:
        arrays |= {name: getattr(memory, name) for name in STATES}
    if memory.has_adapters:
        arrays |= {name: getattr(memory, name) for name in ADAPTER_SHAPES}
    return arrays | dict(zip(block_table_names(len(block_tables)), block_tables, strict=True))
