"""Prometheus exposition of an engine's statistics. The only package that imports prometheus_client."""

from __future__ import annotations

from fastdeploy_sd.metrics.exposition import render_metrics

__all__ = ["render_metrics"]
