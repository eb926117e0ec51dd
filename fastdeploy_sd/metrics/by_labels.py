"""A counter with a sample per tuple of labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric


def by_labels(name: str, text: str, labels: list[str], counts: Mapping[Any, float]) -> Metric:
    """Return a counter with a sample per tuple of labels."""
    counter = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        counter.add_metric(values, count)
    return counter
