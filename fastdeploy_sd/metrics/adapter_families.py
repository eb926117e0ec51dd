"""The metrics of LoRA adapters; without requests for any they have no samples."""

from __future__ import annotations

from fastdeploy_sd.metrics.family import Labelled

ADAPTER_LABELLED_GAUGES = (
    Labelled(
        "fastdeploy_sd:adapter_requests_running",
        "Requests in the batch that run with a LoRA adapter, by its name.",
        "adapter",
        lambda s: s.num_running_by_adapter,
    ),
    Labelled(
        "fastdeploy_sd:adapter_requests_waiting",
        "Requests in the queue for a LoRA adapter, by its name.",
        "adapter",
        lambda s: s.num_waiting_by_adapter,
    ),
)
