"""The speculation benchmark's records as a table and a picture. A method that loses is shown as losing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import table_of
from benchmarks.plot import panels
from benchmarks.prompts import WORKLOADS
from benchmarks.record import Record

KIND = "speculation"
_PLOTTED = {"speed_up": "speed-up over naive", "acceptance_length": "acceptance length, tokens"}
_GROUP_WIDTH = 0.8


def _same_tokens(record: Record) -> str:
    if record.metrics["has_same_tokens"]:
        return "yes"
    return "no (lossy)" if record.workload["is_lossy"] else "NO"


_COLUMNS: Mapping[str, str | Callable[[Record], object]] = {
    "Workload": "{0.workload[workload]}",
    "Batch": "{0.workload[batch]}",
    "Method": "{0.workload[method]}",
    "k": "{0.config[speculative_config][num_speculative_tokens]}",
    "Speed-up": lambda r: f"{r.metrics['speed_up']:.2f}x" + (" (slower)" if r.metrics["speed_up"] < 1.0 else ""),
    "of repeats": "{0.metrics[speed_up_min]:.2f}-{0.metrics[speed_up_max]:.2f}",
    "Tokens/s": "{0.metrics[decode_tokens_per_s]:.1f}",
    "Naive tokens/s": "{0.metrics[naive_decode_tokens_per_s]:.1f}",
    "Acceptance length": "{0.metrics[acceptance_length]:.2f}",
    "Accepted": "{0.metrics[acceptance_rate]:.0%}",
    "Tokens per step": "{0.metrics[tokens_per_step]:.2f}",
    "Step ms": "{0.metrics[step_ms]:.2f}",
    "Naive step ms": "{0.metrics[naive_step_ms]:.2f}",
    "Forward ms": "{0.metrics[forward_ms]:.2f}",
    "Verify ms": "{0.metrics[verify_ms]:.2f}",
    "Draft ms": "{0.metrics[draft_ms]:.2f}",
    "Memory GB/s": "{0.metrics[read_gb_per_s_min]:.0f}-{0.metrics[read_gb_per_s_max]:.0f}",
    "Same tokens": _same_tokens,
}


def speculation_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown, ordered by workload, batch and method.

    Memory is the read bandwidth before and after every repeat, the slowest and the fastest: where they are far apart,
    the machine changed while it was measured.
    """
    return table_of(sorted((r for r in records if r.kind == KIND), key=_order), _COLUMNS)


def _order(record: Record) -> tuple[object, ...]:
    work = record.workload
    return WORKLOADS.index(work["workload"]), work["batch"], work["method"]


def save_plot(records: Sequence[Record], path: Path, title: str) -> None:
    """Write a PNG: a column of panels per workload, a group of bars per method, a bar per batch size.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    workloads = [w for w in WORKLOADS if any(r.workload["workload"] == w for r in records)]
    with panels(path, len(_PLOTTED), len(workloads), title, share_y="row") as grid:
        for row, (metric, label) in enumerate(_PLOTTED.items()):
            for column, workload in enumerate(workloads):
                _draw(grid[row][column], [r for r in records if r.workload["workload"] == workload], metric)
            grid[row][0].set_ylabel(label)
        for panel, workload in zip(grid[0], workloads, strict=True):
            panel.set_title(workload)
        grid[0][-1].legend(title="batch", fontsize="small")


def _draw(panel: Any, records: Sequence[Record], metric: str) -> None:
    methods = list(dict.fromkeys(r.workload["method"] for r in records))
    batches = sorted({r.workload["batch"] for r in records})
    bar = _GROUP_WIDTH / len(batches)
    for i, batch in enumerate(batches):
        values = {r.workload["method"]: r.metrics for r in records if r.workload["batch"] == batch}
        shown = [(x, values[method]) for x, method in enumerate(methods) if method in values]
        places = [x + (i - (len(batches) - 1) / 2) * bar for x, _ in shown]
        heights = [m[metric] for _, m in shown]
        panel.bar(places, heights, bar, label=str(batch))
        if metric == "speed_up":
            spans = [[m[metric] - m["speed_up_min"], m["speed_up_max"] - m[metric]] for _, m in shown]
            panel.errorbar(places, heights, list(zip(*spans, strict=True)), fmt="none", ecolor="black", elinewidth=0.8)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(methods)), methods, rotation=30, ha="right", fontsize="small")
