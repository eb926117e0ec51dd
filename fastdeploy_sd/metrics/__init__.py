"""Prometheus exposition of statistics. The only package that imports prometheus_client."""

from __future__ import annotations

from fastdeploy_sd.metrics.exposition import render_metrics
from fastdeploy_sd.metrics.http_stats import HttpStats
from fastdeploy_sd.metrics.process_stats import ProcessStats, SharedStats
from fastdeploy_sd.metrics.redis_stats import RedisStats
from fastdeploy_sd.metrics.router_stats import (
    InstanceGauges,
    RouterStats,
    render_instance_metrics,
    render_router_metrics,
)

__all__ = [
    "HttpStats",
    "InstanceGauges",
    "ProcessStats",
    "RedisStats",
    "RouterStats",
    "SharedStats",
    "render_instance_metrics",
    "render_metrics",
    "render_router_metrics",
]
