"""The speculation benchmark's records as a Markdown table. A method that loses is shown as losing."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.bench.prompts import WORKLOADS
from fastdeploy_sd.bench.record import Record

KIND = "speculation"
_COLUMNS = (
    "Workload",
    "Batch",
    "Method",
    "k",
    "Speed-up",
    "of repeats",
    "Tokens/s",
    "Naive tokens/s",
    "Acceptance length",
    "Accepted",
    "Tokens per step",
    "Step ms",
    "Naive step ms",
    "Forward ms",
    "Verify ms",
    "Draft ms",
    "Memory GB/s",
    "Same tokens",
)


def speculation_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown, ordered by workload, batch and method.

    Memory is the read bandwidth before and after every repeat, the slowest and the fastest: where they are far apart,
    the machine changed while it was measured.
    """
    rows = sorted((r for r in records if r.kind == KIND), key=_order)
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(_cells(r)) + " |" for r in rows])


def _order(record: Record) -> tuple[object, ...]:
    work = record.workload
    return WORKLOADS.index(work["workload"]), work["batch"], work["method"]


def _cells(record: Record) -> list[str]:
    m, work = record.metrics, record.workload
    rate = m["acceptance_rate"]
    return [
        work["workload"],
        str(work["batch"]),
        work["method"],
        str(record.config["speculative_config"]["num_speculative_tokens"]),
        f"{m['speed_up']:.2f}x" + (" (slower)" if m["speed_up"] < 1.0 else ""),
        f"{m['speed_up_min']:.2f}-{m['speed_up_max']:.2f}",
        f"{m['decode_tokens_per_s']:.1f}",
        f"{m['naive_decode_tokens_per_s']:.1f}",
        f"{m['acceptance_length']:.2f}",
        "-" if rate is None else f"{rate:.0%}",
        f"{m['tokens_per_step']:.2f}",
        f"{m['step_ms']:.2f}",
        f"{m['naive_step_ms']:.2f}",
        f"{m['forward_ms']:.2f}",
        f"{m['verify_ms']:.2f}",
        f"{m['draft_ms']:.2f}",
        f"{m['read_gb_per_s_min']:.0f}-{m['read_gb_per_s_max']:.0f}",
        _same_tokens(record),
    ]


def _same_tokens(record: Record) -> str:
    if record.metrics["has_same_tokens"]:
        return "yes"
    return "no (lossy)" if record.workload["is_lossy"] else "NO"
