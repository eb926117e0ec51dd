"""The records of `bench forward` as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.bench.record import Record

KIND = "forward"


def forward_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown, ordered by context and weight format.

    A column T(M) is the median over the rounds of a step over M rows against one over a single row. Share is what a
    one-row step reads over its time, against the read bandwidth measured in the same round.
    """
    rows = sorted((r for r in records if r.kind == KIND), key=lambda r: (r.workload["context_len"], _order(r)))
    sizes = sorted({m for r in rows for m in r.workload["rows"]} - {1})
    head = ("Weights", "KV", "Context", "T(1) ms", *(f"T({m})/T(1)" for m in sizes))
    head += ("MB read", "Share", "Outside the model us", "Memory GB/s")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(_cells(r, sizes)) + " |" for r in rows])


def _order(record: Record) -> tuple[int, str]:
    return -len(record.weights), record.weights + str(record.config["kv_cache_dtype"])


def _cells(record: Record, sizes: Sequence[int]) -> list[str]:
    m, ratios = record.metrics, record.metrics["ratio"]
    return [
        record.weights,
        str(record.config["kv_cache_dtype"]),
        str(record.workload["context_len"]),
        f"{m['step_ms']['1']:.2f}",
        *("-" if str(size) not in ratios else f"{ratios[str(size)]:.2f}" for size in sizes),
        "-" if m["bytes_per_step"] is None else f"{m['bytes_per_step'] / 1e6:.0f}",
        "-" if m["bandwidth_share"] is None else f"{m['bandwidth_share']:.0%}",
        f"{m['outside_forward_us']:.0f}",
        f"{m['read_gb_per_s_min']:.0f}-{m['read_gb_per_s_max']:.0f}",
    ]
