"""The metrics of KV that instances exchange; without samples where there are no others."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_sd.metrics.family import ByLabels, Labelled, LabelsValues, Single
from fastdeploy_sd.types.stats import WayStats

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
