"""The metrics of KV from the second level of the prefix cache and from other instances, where there are any."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_sd.metrics.family import ByLabels, Labelled, LabelsValues, Single
from fastdeploy_sd.types.stats import WayStats

PREFIX_COUNTERS = (
    Single(
        "fastdeploy_sd:prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache when a request was first scheduled.",
        lambda s: s.num_prefix_query_tokens,
    ),
    Single(
        "fastdeploy_sd:prefix_hits_lost_to_speculation",
        "Prompt tokens in the KV cache that a request could not use when it was first scheduled, as blocks with a "
        "drafter's KV and blocks without are not shared; 0 while all requests are drafted for alike.",
        lambda s: s.num_prefix_lost_tokens,
    ),
)

STATE_GAUGES = (
    Single(
        "fastdeploy_sd:state_snapshots",
        "Places for snapshots of recurrent states, from which prompts go on that start alike.",
        lambda s: s.num_state_snapshots,
    ),
    Single("fastdeploy_sd:state_snapshots_used", "Of these, in use.", lambda s: s.num_used_state_snapshots),
)

SWAP_COUNTERS = (
    Single(
        "fastdeploy_sd:swap_lookups",
        "Times a request had blocks that the first level lacked.",
        lambda s: s.swap.num_lookups,
    ),
    Single(
        "fastdeploy_sd:swap_hits",
        "Of these, times the second level had the first of the blocks.",
        lambda s: s.swap.num_hits,
    ),
    Single(
        "fastdeploy_sd:swap_evictions",
        "Slots of the second level that were overwritten with another block.",
        lambda s: s.swap.num_evicted,
    ),
    Single(
        "fastdeploy_sd:swap_late_loads",
        "Requests that waited for the second level for too long and were computed instead.",
        lambda s: s.swap.num_late,
    ),
)

SWAP_GAUGES = (
    Single("fastdeploy_sd:swap_slots", "Blocks that the second level has room for.", lambda s: s.swap.num_slots),
    Single("fastdeploy_sd:swap_used_slots", "Of these, in use.", lambda s: s.swap.num_used_slots),
)

SWAP_LABELLED_COUNTERS = (
    Labelled(
        "fastdeploy_sd:swap_copies",
        "Blocks whose copy to or from the second level of the prefix cache has ended, by how: stored and loaded; lost "
        "(given away before they were stored), withdrawn (no longer wanted before they were loaded), damaged (the slot "
        "held something else; computed again), failed (the system refused).",
        "end",
        lambda s: {
            "stored": s.swap.num_stored,
            "loaded": s.swap.num_loaded,
            "lost": s.swap.num_lost,
            "withdrawn": s.swap.num_withdrawn,
            "damaged": s.swap.num_damaged,
            "failed": s.swap.num_failed,
        },
    ),
    Labelled(
        "fastdeploy_sd:swap_bytes",
        "Bytes of the blocks that were stored in and loaded from the second level.",
        "direction",
        lambda s: {
            "stored": s.swap.num_stored * s.swap.block_bytes,
            "loaded": s.swap.num_loaded * s.swap.block_bytes,
        },
    ),
    Labelled(
        "fastdeploy_sd:swap_seconds",
        "Time of the thread that copies, by direction.",
        "direction",
        lambda s: {"stored": s.swap.store_seconds, "loaded": s.swap.load_seconds},
    ),
    Labelled(
        "fastdeploy_sd:supplied_kv_tokens",
        "Tokens whose KV was not computed here, by where it came from; the prefix cache in memory is not counted.",
        "origin",
        lambda s: s.num_supplied_tokens,
    ),
    Labelled(
        "fastdeploy_sd:kv_failures",
        "Requests that waited for KV from another instance and were computed here all the same, by why.",
        "reason",
        lambda s: s.num_kv_failures,
    ),
)

TRANSFER_COUNTERS = (
    Single(
        "fastdeploy:send_cache_failed_num",
        "Orders of decode instances for KV that were given up, here or there, before all of it was sent.",
        lambda s: s.transfers.num_unsent,
    ),
)

TRANSFER_LABELLED_COUNTERS = (
    Labelled(
        "fastdeploy_sd:kv_transfer_refusals",
        "Pages of KV that were not written, and messages about KV that were not obeyed, by why: malformed, unexpected, "
        "unknown_transfer (it has ended), out_of_bounds, duplicate, wrong_size, damaged.",
        "reason",
        lambda s: s.transfers.num_refused,
    ),
)


def _ways(value: Callable[[WayStats], float]) -> LabelsValues:
    return lambda s: {
        (direction, protocol): value(way)
        for direction, ways in (("received", s.transfers.received), ("sent", s.transfers.sent))
        for protocol, way in ways.items()
    }


_LABELS = ("direction", "protocol")
TRANSFER_WAYS = (
    ByLabels(
        "fastdeploy_sd:kv_transfers",
        "Prompts whose KV was received from prefill instances, or sent to decode instances, in full.",
        _LABELS,
        _ways(lambda way: way.num_transfers),
    ),
    ByLabels(
        "fastdeploy_sd:kv_transfer_seconds",
        "Of these, time from the order to the end; most of it is the prompt's computation.",
        _LABELS,
        _ways(lambda way: way.seconds),
    ),
    ByLabels(
        "fastdeploy_sd:kv_transfer_pages",
        "Pages of KV (a block in a layer) that were written here, or sent.",
        _LABELS,
        _ways(lambda way: way.num_pages),
    ),
    ByLabels("fastdeploy_sd:kv_transfer_bytes", "Bytes of these pages.", _LABELS, _ways(lambda way: way.num_bytes)),
)
