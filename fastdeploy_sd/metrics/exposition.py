"""Statistics of engine and HTTP -> Prometheus text. Keeps no state: whichever HTTP process is scraped says the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, zip_longest
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastdeploy_sd.metrics import families
from fastdeploy_sd.metrics.http_stats import HttpStats
from fastdeploy_sd.metrics.process_stats import ProcessStats
from fastdeploy_sd.metrics.redis_stats import RedisStats
from fastdeploy_sd.types.stats import EngineState, EngineStats, Histogram


def render_metrics(models: Mapping[str, Sequence[EngineState]], processes: ProcessStats) -> tuple[bytes, str]:
    """Return the body and the content type of a /metrics answer.

    Args:
        models: name -> its engines. Of several engines, every metric has a sample per engine, whose number is in the
            label `engine`; of several models, their names are in the label `model_name` too.
        processes: what the others count, together.
    """
    engines = [(name, engine) for name, of_model in models.items() for engine in of_model]
    parts = [
        ({"engine": str(number)} | ({"model_name": name} if len(models) > 1 else {}), _families_of(engine))
        for number, (name, engine) in enumerate(engines)
    ]
    of_engines = parts[0][1] if len(parts) == 1 else merged(parts)
    return render(chain(of_engines, http_families(processes.http), _redis_families(processes.redis)))


def _families_of(engine: EngineState) -> Iterator[Metric]:
    if engine.last_stats is not None:
        yield from _EngineFamilies(engine.last_stats).all()
    yield GaugeMetricFamily(
        "fastdeploy_sd:engine_silence_seconds",
        "Time since the engine process last said something or was seen computing.",
        value=engine.silence_s,
    )


def merged(parts: Iterable[tuple[Mapping[str, str], Iterable[Metric]]]) -> Iterable[Metric]:
    """Merge the metrics of several parts into families with labels that name the part."""
    found: dict[str, Metric] = {}
    for labels, families_of_part in parts:
        for family in families_of_part:
            samples = [s._replace(labels={**labels, **s.labels}) for s in family.samples]
            family.samples = found[family.name].samples + samples if family.name in found else samples
            found[family.name] = family
    return found.values()


def render(families_of_answer: Iterable[Metric]) -> tuple[bytes, str]:
    """Return the body and the content type of an answer with these metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families_of_answer))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def by_labels(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, float]) -> Metric:
    """Return a counter with a sample per tuple of labels."""
    counter = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        counter.add_metric(values, count)
    return counter


def by_label(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    """Return a counter with a sample per value of one label."""
    return by_labels(name, text, [label], {(value,): count for value, count in counts.items()})


class _Given(Collector):
    """The metrics of one answer, as prometheus_client wants them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _EngineFamilies:
    """The metrics of one snapshot of the engine's statistics."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def all(self) -> Iterator[Metric]:
        yield from self._singles()
        yield from self._labelled()
        for several in families.BY_LABELS:
            yield by_labels(several.name, several.text, several.labels, several.values(self._stats))
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
            yield by_label(spec.name, spec.text, spec.label, spec.values(self._stats))
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
        for position, share in _acceptance_at_positions(self._stats):
            yield GaugeMetricFamily(
                f"fastdeploy:spec_decode_draft_single_head_acceptance_rate_{position}",
                f"Drafts accepted at position {position} (0 = first) of those verified there after accepted ones only.",
                value=share,
            )


def _acceptance_at_positions(stats: EngineStats) -> list[tuple[int, float]]:
    """Return (position, share accepted of the drafts whose predecessors were accepted) of positions reached so far."""
    reached = _per_position([counts.reached for counts in stats.drafts.values()])
    accepted = _per_position([counts.accepted for counts in stats.drafts.values()])
    return [(i, accepted[i] / num_reached) for i, num_reached in enumerate(reached) if num_reached]


def _per_position(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def http_families(http: HttpStats) -> Iterator[Metric]:
    """Yield the metrics of the HTTP side."""
    yield GaugeMetricFamily("fastdeploy_sd:http_connections", "Open connections.", value=http.num_open)
    yield CounterMetricFamily("fastdeploy_sd:http_connections_accepted", "Connections served.", value=http.num_accepted)
    yield by_label(
        "fastdeploy_sd:http_connections_refused",
        "Connections not served, by reason: limit, address_limit (answered 503), system (attempts to accept one "
        "without a descriptor left; it waits).",
        "reason",
        http.refused,
    )
    yield by_label(
        "fastdeploy_sd:http_connections_closed",
        "Connections closed before they had sent a complete request, by reason: headers_timeout, body_timeout, "
        "malformed, surplus_body (more than is read), room (another one needed its place).",
        "reason",
        http.closed,
    )
    yield by_labels(
        "fastdeploy_sd:http_requests",
        "Requests by route, status of the answer (499 = the client left before) and code or type of its error.",
        ["route", "status", "error"],
        http.requests,
    )


def _redis_families(redis: RedisStats) -> Iterator[Metric]:
    """Yield what a server's processes count; without samples where no Redis is used."""
    for name, text, label, counts in (
        (
            "requests",
            "Requests by where they were placed, of clients of this server: kept (run here), pushed (to another "
            "instance); and of others: taken. One that goes on elsewhere is placed again.",
            "place",
            redis.requests,
        ),
        ("moves", "Requests that left an instance before their end, by why.", "reason", redis.moves),
        ("round_trips", "Round trips to Redis, by what for.", "purpose", redis.round_trips),
        (
            "errors",
            "What failed with Redis, by kind: timeout, connection, refused (it answers with an error), answer (it "
            "is no Redis), unreadable (messages that are not of this deployment).",
            "kind",
            redis.errors,
        ),
        ("bytes", "Bytes of messages that were pushed and taken.", "direction", redis.num_bytes),
    ):
        yield by_label(f"fastdeploy_sd:redis_{name}", text, label, counts)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum)
