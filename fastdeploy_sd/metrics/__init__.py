"""Prometheus exposition of the statistics of engine and HTTP. The only package that imports prometheus_client."""

from __future__ import annotations

from fastdeploy_sd.metrics.exposition import render_metrics
from fastdeploy_sd.metrics.http_stats import HttpStats, SharedStats

__all__ = ["HttpStats", "SharedStats", "render_metrics"]
