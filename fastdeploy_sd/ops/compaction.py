"""compact_kv_ and compact_rows_: what verified trees of drafts keep moves to where a chain's would be.

The meaning of each op is the function of its name in `reference.compaction`.
"""

from __future__ import annotations

from fastdeploy_sd.device.program.declaration import ANY, I32, I64, In, InOut, Value
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.attention import cache_arrays, cache_parts
from fastdeploy_sd.ops.kv_cache import KvCache, VerifiedPaths

_PATHS = {
    "cu_num_logits": In(I32, "num_requests + 1"),
    "cu_num_output": In(I32, "num_requests + 1"),
    "output_rows": In(I32, "num_logits"),
    "logits_indices": In(I32, "num_logits"),
}
COMPACT_KV = Op(
    "compact_kv", None, **cache_parts(InOut), dtype=Value("0"), **_PATHS, slot_mapping=In(I64, "num_tokens")
)
COMPACT_ROWS = Op(
    "compact_rows", None, **_PATHS, rows=InOut(ANY, "num_tokens, width"), row_bytes=Value("width*itemsize(rows)")
)


def compact_kv_(cache: KvCache[A], paths: VerifiedPaths[A], slot_mapping: A) -> None:
    """Move k and v of the tokens whose rows have output, in place. `slot_mapping`: i64[T], of the step's tokens."""
    COMPACT_KV(**cache_arrays(cache), **paths._asdict(), slot_mapping=slot_mapping)


def compact_rows_(rows: A, paths: VerifiedPaths[A]) -> None:
    """Move [T, H] rows of the step's tokens, in place."""
    COMPACT_ROWS(rows=rows, **paths._asdict())
