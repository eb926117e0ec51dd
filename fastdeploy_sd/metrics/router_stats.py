"""Counters of a router, and their Prometheus text. Knows no router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_sd.metrics.exposition import by_label, by_labels, http_families, merged, render
from fastdeploy_sd.metrics.http_stats import HttpStats


@dataclass(frozen=True, slots=True)
class InstanceGauges:
    """An instance as of now.

    Attributes:
        address: of its server; of one with several engines, followed by its number among them.
        state: available, silent, resting (it fails), paused, or refusing (it drains, or its engine is silent).
    """

    address: str
    role: str
    state: str
    num_requests: int


@dataclass(slots=True)
class RouterStats:
    """Counters of a router since it started.

    Attributes:
        given: (address of the instance, its role) -> requests given to it, prompts for their KV included.
        failures: (address, reason) -> requests that failed there, by code.
        num_retries: requests that were given to another instance, or again, before the client had got anything.
        num_resumed: times that a stream went on at another instance.
        num_unplaced: requests and streams that no instance could take.
        num_unpaired: requests that a decode instance got without a prefill instance.
        registrations: outcome -> registrations: "taken", or the code or type of the refusal.
    """

    given: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_retries: int = 0
    num_resumed: int = 0
    num_unplaced: int = 0
    num_unpaired: int = 0
    registrations: Counter[str] = field(default_factory=Counter)


def render_router_metrics(stats: RouterStats, instances: list[InstanceGauges], http: HttpStats) -> tuple[bytes, str]:
    """Return the body and the content type of a router's /metrics answer."""
    return render(chain(_router_families(stats, instances), http_families(http)))


def render_instance_metrics(bodies: Mapping[str, str | None]) -> tuple[bytes, str]:
    """Return the metrics of all instances in one answer.

    Args:
        bodies: address -> what its /metrics answered; None = nothing in time, or an error.
    """
    scraped = GaugeMetricFamily(
        "fastdeploy_sd:router_instance_scraped",
        "1 if an instance's own metrics are in this answer, 0 if it gave none in time.",
        labels=["instance"],
    )
    for address, body in bodies.items():
        scraped.add_metric([address], float(body is not None))
    parts = [
        ({"instance": address}, text_string_to_metric_families(body))
        for address, body in bodies.items()
        if body is not None
    ]
    return render(chain([scraped], merged(parts)))


def _router_families(stats: RouterStats, registered: list[InstanceGauges]) -> Iterator[Metric]:
    counts = Counter((i.role, i.state) for i in registered)
    instances = GaugeMetricFamily(
        "fastdeploy_sd:router_instances",
        "Registered instances by role and state: available, silent (no heartbeat), resting (it fails), paused (here), "
        "refusing (it drains, is paused by itself, or its engine is silent).",
        labels=["role", "state"],
    )
    for labels, count in counts.items():
        instances.add_metric(list(labels), count)
    yield instances
    requests = GaugeMetricFamily(
        "fastdeploy_sd:router_instance_requests",
        "Requests running and waiting at an instance, as the router estimates it.",
        labels=["instance"],
    )
    for instance in registered:
        requests.add_metric([instance.address], instance.num_requests)
    yield requests
    yield by_labels(
        "fastdeploy_sd:router_requests_given",
        "Requests given to an instance; to a prefill instance, prompts to compute KV for.",
        ["instance", "role"],
        stats.given,
    )
    yield by_labels(
        "fastdeploy_sd:router_failures",
        "Requests that failed at an instance in a way that another one need not, by reason.",
        ["instance", "reason"],
        stats.failures,
    )
    yield CounterMetricFamily(
        "fastdeploy_sd:router_retries",
        "Requests given to another instance, or again, before the client had got anything.",
        value=stats.num_retries,
    )
    yield CounterMetricFamily(
        "fastdeploy_sd:router_resumed_streams", "Times a stream went on at another instance.", value=stats.num_resumed
    )
    yield CounterMetricFamily(
        "fastdeploy_sd:router_unplaced", "Requests and streams that no instance could take.", value=stats.num_unplaced
    )
    yield CounterMetricFamily(
        "fastdeploy_sd:router_unpaired",
        "Requests that a decode instance got without a prefill instance, as none was available whose KV fits.",
        value=stats.num_unpaired,
    )
    yield by_label(
        "fastdeploy_sd:router_registrations",
        "Registrations by outcome: taken, or the code or type of the refusal.",
        "outcome",
        stats.registrations,
    )
