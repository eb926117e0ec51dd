"""The table of all metrics for docs/metrics.md, made from what /metrics answers."""

from __future__ import annotations

import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_sd.metrics.exposition import render_metrics
from fastdeploy_sd.metrics.http_stats import HttpStats
from fastdeploy_sd.metrics.process_stats import ProcessStats
from fastdeploy_sd.metrics.redis_stats import RedisStats
from fastdeploy_sd.metrics.router_stats import InstanceGauges, RouterStats, render_router_metrics
from fastdeploy_sd.types import Calibration, ChoiceReport, DraftCounts
from fastdeploy_sd.types.experts import ExpertStats
from fastdeploy_sd.types.stats import EngineState, EngineStats, SourceCounts, TransferStats, WayStats

# Enough has happened for every family to have a sample and for every label to have a value.
_SOME = EngineStats(
    drafts={"mtp": SourceCounts((1,), (1,), (1,))},
    verifications={"mtp": DraftCounts(1, 1, (1,), (1,), (1,))},
    timings_ms={"forward": 1.0},
    transfers=TransferStats({"ipc": WayStats()}, num_refused={"damaged": 1}),
    experts=ExpertStats({0: (1,)}, {0: 1.0}),
    choice=ChoiceReport(1.0, "", {"drafts": 1}, 1.0, 1.0, {"ngram": Calibration(1, 1.0, 1, 0.0)}),
)
_SOME_HTTP = HttpStats(
    refused=Counter(limit=1), closed=Counter(malformed=1), requests=Counter({("/health", "200", ""): 1})
)
_SOME_REDIS = RedisStats(Counter(kept=1), Counter(draining=1), Counter(push=1), Counter(timeout=1), Counter(pushed=1))
_OF_HISTOGRAMS = {"le"}
# FastDeploy puts the position into the name.
_POSITION_IN_NAME = re.compile(r"_rate_0$")


def metrics_markdown() -> str:
    """Return name, type, labels and meaning of every metric as a table; names as they are in the text."""
    body, _ = render_metrics({"": [EngineState("ready", 0.0, _SOME)]}, ProcessStats(_SOME_HTTP, _SOME_REDIS))
    return _table_of(body)


def router_metrics_markdown() -> str:
    """Return the same of a router, without what it shares with servers."""
    gauges = [InstanceGauges("127.0.0.1:8000", "mixed", "available", 1)]
    stats = RouterStats(Counter({("a", "mixed"): 1}), Counter({("a", "failed"): 1}), registrations=Counter(taken=1))
    body, _ = render_router_metrics(stats, gauges, HttpStats())
    return _table_of(body, of_prefix="fastdeploy_sd:router_")


def _table_of(body: bytes, of_prefix: str = "") -> str:
    rows = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    for family in text_string_to_metric_families(body.decode()):
        if not family.name.startswith(of_prefix):
            continue
        labels = dict.fromkeys(name for sample in family.samples for name in sample.labels)
        shown = ", ".join(f"`{name}`" for name in labels if name not in _OF_HISTOGRAMS)
        name = family.name + ("_total" if family.type == "counter" else "")
        text = _POSITION_IN_NAME.sub("_rate_{i}", name)
        meaning = family.documentation.replace("position 0 (0 = first)", "position i (0 = first)")
        rows.append(f"| `{text}` | {family.type} | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"
