"""Statistics of engine and HTTP -> Prometheus text. Keeps no state: whichever HTTP process is scraped says the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastdeploy_sd.metrics import families
from fastdeploy_sd.metrics.by_labels import by_labels
from fastdeploy_sd.metrics.http_stats import HttpStats
from fastdeploy_sd.metrics.process_stats import ProcessStats
from fastdeploy_sd.metrics.redis_stats import RedisCollector
from fastdeploy_sd.types.stats import EngineStats, Histogram


def render_metrics(stats: EngineStats | None, processes: ProcessStats, silence_s: float) -> tuple[bytes, str]:
    """Return the body and the content type of a /metrics answer.

    Args:
        stats: None = the engine has not told any yet.
        processes: what the others count, together.
        silence_s: how old the engine's last sign of life is.
    """
    registry = CollectorRegistry(auto_describe=False)
    if stats is not None:
        registry.register(_StatsCollector(stats))
    registry.register(_SilenceCollector(silence_s))
    registry.register(HttpCollector(processes.http))
    registry.register(RedisCollector(processes.redis))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _StatsCollector(Collector):
    """Presents one snapshot."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # names cannot collide: the registry holds nothing else

    def collect(self) -> Iterator[Metric]:
        yield from self._singles()
        yield from self._labelled()
        for several in families.BY_LABELS:
            yield by_labels(several.name, several.text, list(several.labels), several.values(self._stats))
        yield from self._by_position()
        yield self._cache_config()
        yield self._speculation()
        yield from self._acceptance_by_position()
        for name, text, key in families.HISTOGRAMS:
            yield _histogram(name, text, self._stats.histograms[key])

    def _singles(self) -> Iterator[Metric]:
        for counter in families.COUNTERS:
            yield CounterMetricFamily(counter.name, counter.text, value=counter.value(self._stats))
        for gauge in families.GAUGES:
            yield GaugeMetricFamily(gauge.name, gauge.text, value=gauge.value(self._stats))

    def _labelled(self) -> Iterator[Metric]:
        for spec in families.LABELLED_COUNTERS:
            counter = CounterMetricFamily(spec.name, spec.text, labels=[spec.label])
            for label, value in spec.values(self._stats).items():
                counter.add_metric([label], value)
            yield counter
        for spec in families.LABELLED_GAUGES:
            gauge = GaugeMetricFamily(spec.name, spec.text, labels=[spec.label])
            for label, value in spec.values(self._stats).items():
                gauge.add_metric([label], value)
            yield gauge

    def _cache_config(self) -> Metric:
        info = GaugeMetricFamily(
            "fastdeploy:cache_config_info", "Shape of the KV cache, in labels.", labels=["block_size", "num_gpu_blocks"]
        )
        info.add_metric([str(self._stats.block_size), str(self._stats.num_blocks)], 1)
        return info

    def _speculation(self) -> Metric:
        info = GaugeMetricFamily(
            "fastdeploy_sd:spec_decode_config_info",
            "How requests are drafted for, in labels: the method of those that name none, drafts per request and step "
            "at most, and whether verification may emit tokens that plain decoding would not (lossy).",
            labels=["method", "num_speculative_tokens", "lossy"],
        )
        s = self._stats.speculation
        info.add_metric([s.method, str(s.max_draft_tokens), str(s.lossy).lower()], 1)
        return info

    def _by_position(self) -> Iterator[Metric]:
        for spec in families.BY_POSITION:
            counter = CounterMetricFamily(spec.name, spec.text, labels=[spec.label, "position"])
            for label, counts in spec.values(self._stats).items():
                for position, count in enumerate(counts):
                    counter.add_metric([label, str(position)], count)
            yield counter

    def _acceptance_by_position(self) -> Iterator[Metric]:
        """FastDeploy has one gauge per position, with the position in the name."""
        for position, share in families.acceptance_at_positions(self._stats):
            yield GaugeMetricFamily(
                f"fastdeploy:spec_decode_draft_single_head_acceptance_rate_{position}",
                f"Drafts accepted at position {position} (0 = first) of those verified there after accepted ones only.",
                value=share,
            )


class _SilenceCollector(Collector):
    """Presents the engine's silence, also when it says nothing."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "fastdeploy_sd:engine_silence_seconds",
            "Time since the engine process last said something or was seen computing.",
            value=self._silence_s,
        )


class HttpCollector(Collector):
    """Presents what the HTTP side knows."""

    def __init__(self, http: HttpStats) -> None:
        self._http = http

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("fastdeploy_sd:http_connections", "Open connections.", value=self._http.num_open)
        yield CounterMetricFamily(
            "fastdeploy_sd:http_connections_accepted", "Connections served.", value=self._http.num_accepted
        )
        yield by_labels(
            "fastdeploy_sd:http_connections_refused",
            "Connections not served, by reason: limit, address_limit (answered 503), system (attempts to accept one "
            "without a descriptor left; it waits).",
            ["reason"],
            {(reason,): count for reason, count in self._http.refused.items()},
        )
        yield by_labels(
            "fastdeploy_sd:http_connections_closed",
            "Connections closed before they had sent a complete request, by reason: headers_timeout, body_timeout, "
            "malformed, surplus_body (more than is read), room (another one needed its place).",
            ["reason"],
            {(reason,): count for reason, count in self._http.closed.items()},
        )
        yield by_labels(
            "fastdeploy_sd:http_requests",
            "Requests by route, status of the answer (499 = the client left before) and code or type of its error.",
            ["route", "status", "error"],
            self._http.requests,
        )


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum)
