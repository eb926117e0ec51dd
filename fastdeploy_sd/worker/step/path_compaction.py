"""After a step with trees of drafts: their accepted paths take the places of chains, in KV and hidden rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import HOST_BUFFERS, DeviceBuffers
from fastdeploy_sd.device.program.program import Padding, Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.ops.batch import group_slots
from fastdeploy_sd.ops.compaction import compact_kv_, compact_rows_
from fastdeploy_sd.ops.kv_cache import RequestBlocks, VerifiedPaths
from fastdeploy_sd.ops.mtp import keep_hidden_
from fastdeploy_sd.types import I32
from fastdeploy_sd.worker.step.forward import ForwardPass
from fastdeploy_sd.worker.step.step_inputs import block_table_names


class PathCompaction:
    """Moves what a step stored for accepted drafts that are no chain; rejected ones are overwritten later.

    One native call for all layers and KV groups, recorded when the model is loaded.

    Args:
        forward_pass: its layers' KV; its readers keep their rows again.
        draft_rows: [T, H of the reader] of each reader of the pass; several may share one.
        block_tables: per KV group i32[max_num_seqs, max_blocks], the requests' blocks by table row.
        buffers: of the memory and the tables, where the model is on a device.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        draft_rows: Sequence[Tensor],
        memory: StepMemory,
        block_tables: Sequence[I32],
        buffers: DeviceBuffers = HOST_BUFFERS,
    ) -> None:
        recorder, limits = Recorder(), memory.limits
        arrays = {name: getattr(memory, name) for name in _SHAPES}
        arrays |= dict(zip(block_table_names(len(block_tables)), block_tables, strict=True))
        inputs = {
            name: recorder.add_input(
                name,
                paddle.int64 if name == "slot_mapping" else paddle.int32,
                (_SHAPES[name],) if name in _SHAPES else array.shape,
            )
            for name, array in arrays.items()
        }
        _record(inputs, forward_pass, draft_rows)
        bounds = {
            "num_tokens": limits.num_tokens,
            "num_requests": limits.num_requests,
            "num_logits": limits.num_logits,
        }
        self._memory = memory
        self._program = device().program(
            Recording(recorder, (), bounds, _PADDING), {name: buffers.of(array) for name, array in arrays.items()}
        )

    def __call__(self) -> None:
        """Run it for the verified step that the memory holds."""
        m = self._memory
        self._program.run({"num_tokens": m.num_tokens, "num_requests": m.num_requests, "num_logits": m.num_logits})


_SHAPES = {
    "table_rows": Size("num_requests"),
    "seq_lens": Size("num_requests"),
    "slot_mapping": Size("num_tokens"),
    "logits_indices": Size("num_logits"),
    "output_rows": Size("num_logits"),
    "query_start_loc": Size("num_requests") + 1,
    "cu_num_logits": Size("num_requests") + 1,
    "cu_num_output": Size("num_requests") + 1,
}
# Rows after a step's own, where a device rounds sizes up, have no output.
_PADDING: Padding = {
    **dict.fromkeys(_SHAPES, 0),
    **dict.fromkeys(("query_start_loc", "cu_num_logits", "cu_num_output"), "last"),
    "slot_mapping": -1,
}


class _Rows(NamedTuple):
    """See `ops.mtp_batch.RowMaps`."""

    query_start_loc: Any
    seq_lens: Any


def _record(inputs: dict[str, Any], forward_pass: ForwardPass, draft_rows: Sequence[Tensor]) -> None:
    rows, starts, lens = inputs["table_rows"], inputs["query_start_loc"], inputs["seq_lens"]
    paths = VerifiedPaths(*(inputs[name] for name in VerifiedPaths._fields))
    first, *others = (RequestBlocks(rows, inputs[name]) for name in block_table_names(forward_pass.num_groups))
    size, slots = forward_pass.caches[0].block_size, [inputs["slot_mapping"]]
    slots += [group_slots(slots[0], starts, lens, blocks, size) for blocks in others]
    for cache in forward_pass.caches:
        compact_kv_(cache, paths, slots[cache.group])
    for hidden in {id(hidden): hidden for hidden in draft_rows}.values():
        compact_rows_(hidden, paths)
    for reader, hidden in zip(forward_pass.readers, draft_rows, strict=True):
        keep_hidden_(first, _Rows(starts, lens), hidden, reader.kept)
