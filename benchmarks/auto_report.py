"""The records of `bench auto` as a table and a picture. A setting that loses is shown as losing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import table_of
from benchmarks.plot import panels
from benchmarks.prompts import WORKLOADS
from benchmarks.record import Record
from fastdeploy_sd.draft_methods import NAIVE

KIND = "auto"


def auto_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown, a row per cell and a column per setting.

    A cell of the table is the setting's speed-up over plain decoding and, in brackets, its tokens per request and step,
    and the acceptance length over the steps that verified drafts.
    """
    cells = sorted((r for r in records if r.kind == KIND), key=_order)
    names = list(dict.fromkeys(name for r in cells for name in r.metrics["settings"] if name != NAIVE))
    chosen = list(dict.fromkeys(name for r in cells for name in r.metrics["over_best"]))
    columns: dict[str, str | Callable[[Record], object]] = {
        "Model": "{0.workload[model]}",
        "Text": "{0.workload[workload]}",
        "T": "{0.workload[temperature]:g}",
        "Batch": "{0.workload[batch]}",
        "Plain tokens/s": lambda r: f"{r.metrics['settings'][NAIVE]['tokens_per_s']:.0f}",
        **{name: partial(_setting, name) for name in names},
        "Best fixed": "{0.metrics[best]}",
        **{f"{name} / best": partial(_over_best, name) for name in chosen},
        "Same tokens": lambda r: "yes" if r.metrics["has_same_tokens"] else "NO",
    }
    return table_of(cells, columns)


def _setting(name: str, record: Record) -> str | None:
    found = record.metrics["settings"].get(name)
    if found is None:
        return None
    return f"{found['speed_up']:.2f}x ({found['tokens_per_step']:.2f}, {found['acceptance_length']:.2f})"


def _over_best(name: str, record: Record) -> str | None:
    ratio = record.metrics["over_best"].get(name)
    return None if ratio is None else f"{ratio:.2f}x"


def _order(record: Record) -> tuple[object, ...]:
    work = record.workload
    return work["model"], work["temperature"], WORKLOADS.index(work["workload"]), work["batch"]


def save_plot(records: Sequence[Record], path: Path) -> None:
    """Write a PNG: a row of panels per model, one per kind of text; a line per setting over the batch size.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    models = list(dict.fromkeys(r.workload["model"] for r in records))
    workloads = [w for w in WORKLOADS if any(r.workload["workload"] == w for r in records)]
    with panels(path, len(models), len(workloads), "speed-up over plain decoding") as grid:
        for row, model in zip(grid, models, strict=True):
            for panel, workload in zip(row, workloads, strict=True):
                cell = [r for r in records if (r.workload["model"], r.workload["workload"]) == (model, workload)]
                _draw(panel, sorted(cell, key=_order))
                panel.set_title(f"{model}, {workload}", fontsize="small")
            row[0].set_ylabel("tokens/s over plain")
        grid[0][-1].legend(fontsize="x-small")


def _draw(panel: Any, records: Sequence[Record]) -> None:
    chosen = {name for r in records for name in r.metrics["over_best"]}
    for name in dict.fromkeys(name for r in records for name in r.metrics["settings"] if name != NAIVE):
        measured = [r for r in records if name in r.metrics["settings"]]
        found = [r.metrics["settings"][name] for r in measured]
        panel.errorbar(
            [r.workload["batch"] for r in measured],
            [f["speed_up"] for f in found],
            [[f["speed_up"] - f["speed_up_min"] for f in found], [f["speed_up_max"] - f["speed_up"] for f in found]],
            label=name,
            linewidth=2.5 if name in chosen else 1.0,
            marker="o" if name in chosen else ".",
        )
    panel.set_xscale("log", base=2)
    panel.set_xlabel("requests at once", fontsize="small")
    panel.axhline(1.0, color="black", linewidth=0.8)
