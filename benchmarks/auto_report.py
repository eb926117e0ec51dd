"""The records of `bench auto` as a table and a picture. A setting that loses is shown as losing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import table_of
from benchmarks.plot import panels
from benchmarks.prompts import WORKLOADS
from benchmarks.record import Record
from fastdeploy_sd.types.draft_methods import NAIVE

KIND = "auto"
# What a setting that chooses by itself is to reach in every cell, and the colours of cells where it does and does not.
LEAST_OF_PLAIN, LEAST_OF_BEST = 0.98, 0.97
FINE, SHORT, SLOWER = "#b7e1b0", "#ffb347", "#e8463c"


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


def account_table(records: Sequence[Record]) -> str:
    """Return as Markdown what the settings' steps were and took: a row per cell and setting.

    Of a step: the drafts of all its requests, and milliseconds; `Engine ms`: what is neither the model's nor drafting.
    The phases are the clock's, so that this is not known where the processor's time was counted.
    """
    cells = sorted((r for r in records if r.kind == KIND), key=_order)
    rows = [(r, name, r.metrics["settings"][name]) for r in cells for name in r.metrics["settings"]]
    columns: dict[str, str | Callable[[Any], object]] = {
        "Text": "{0[0].workload[workload]}",
        "Batch": "{0[0].workload[batch]}",
        "Setting": "{0[1]}",
        "Over plain": "{0[2][speed_up]:.2f}x",
        "Steps": "{0[2][num_steps]:.0f}",
        "Drafts / step": lambda row: f"{row[2]['num_drafts'] / row[2]['num_steps']:.1f}",
        "Right": lambda row: None if row[2]["acceptance_rate"] is None else f"{row[2]['acceptance_rate']:.0%}",
        "Step ms": "{0[2][step_ms]:.3f}",
        "Forward ms": "{0[2][forward_ms]:.3f}",
        "Draft ms": "{0[2][draft_ms]:.3f}",
        "Engine ms": _engine_ms,
    }
    return table_of(rows, columns)


def _engine_ms(row: tuple[Record, str, Mapping[str, float]]) -> str | None:
    record, _, found = row
    if record.workload["cpu_time"]:
        return None
    return f"{found['step_ms'] - found['forward_ms'] - found['draft_ms']:.3f}"


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
    """Write a PNG with a row of panels per model: every cell's verdict in one look, then the lines behind it.

    The first panel has a field per kind of text and batch size for what chooses by itself: its tokens/s over plain
    decoding and over the best fixed setting, red where it is slower than plain, orange where it is short of the best,
    green elsewhere. The other panels have a line per setting over the batch size, with a ring around what is not green.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    models = list(dict.fromkeys(r.workload["model"] for r in records))
    workloads = [w for w in WORKLOADS if any(r.workload["workload"] == w for r in records)]
    title = (
        "over plain decoding, and below it over the best fixed setting: "
        f"red is less than {LEAST_OF_PLAIN} of plain, orange less than {LEAST_OF_BEST} of the best"
    )
    with panels(path, len(models), 1 + len(workloads), title) as grid:
        for row, model in zip(grid, models, strict=True):
            _draw_verdicts(row[0], [r for r in records if r.workload["model"] == model], workloads)
            row[0].set_title(model, fontsize="small")
            for panel, workload in zip(row[1:], workloads, strict=True):
                cell = [r for r in records if (r.workload["model"], r.workload["workload"]) == (model, workload)]
                _draw(panel, sorted(cell, key=_order))
                panel.set_title(f"{model}, {workload}", fontsize="small")
            row[1].set_ylabel("tokens/s over plain")
            row[-1].legend(fontsize="x-small")


def verdict(record: Record) -> str:
    """Return the colour of a cell by the worst setting in it that chooses by itself."""
    chosen = record.metrics["over_best"]
    if any(record.metrics["settings"][name]["speed_up"] < LEAST_OF_PLAIN for name in chosen):
        return SLOWER
    return SHORT if any(ratio < LEAST_OF_BEST for ratio in chosen.values()) else FINE


def _draw_verdicts(panel: Any, records: Sequence[Record], workloads: Sequence[str]) -> None:
    batches = sorted({r.workload["batch"] for r in records})
    for r in records:
        x, y = batches.index(r.workload["batch"]), workloads.index(r.workload["workload"])
        chosen = r.metrics["over_best"]
        text = "\n".join(f"{r.metrics['settings'][name]['speed_up']:.2f}\n{chosen[name]:.2f}" for name in chosen)
        panel.fill_between([x - 0.48, x + 0.48], y - 0.48, y + 0.48, color=verdict(r), linewidth=0)
        panel.text(x, y, text, ha="center", va="center", fontsize="x-small")
    panel.set_xticks(range(len(batches)), batches, fontsize="small")
    panel.set_yticks(range(len(workloads)), workloads, fontsize="small")
    panel.set_xlim(-0.5, len(batches) - 0.5)
    panel.set_ylim(len(workloads) - 0.5, -0.5)
    panel.set_xlabel("requests at once", fontsize="small")


def _draw(panel: Any, records: Sequence[Record]) -> None:
    batches = sorted({r.workload["batch"] for r in records})
    chosen = {name for r in records for name in r.metrics["over_best"]}
    for name in dict.fromkeys(name for r in records for name in r.metrics["settings"] if name != NAIVE):
        measured = [r for r in records if name in r.metrics["settings"]]
        found = [r.metrics["settings"][name] for r in measured]
        panel.errorbar(
            [r.workload["batch"] for r in measured],
            [f["speed_up"] for f in found],
            [[f["speed_up"] - f["speed_up_min"] for f in found], [f["speed_up_max"] - f["speed_up"] for f in found]],
            label=name,
            color="black" if name in chosen else None,
            linewidth=2.5 if name in chosen else 1.0,
            marker="o" if name in chosen else ".",
        )
        missed = [r for r in measured if name in chosen and verdict(r) != FINE]
        ring = {"s": 160, "facecolors": "none", "linewidths": 2.0, "zorder": 3}
        height = [r.metrics["settings"][name]["speed_up"] for r in missed]
        panel.scatter([r.workload["batch"] for r in missed], height, edgecolors=list(map(verdict, missed)), **ring)
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, batches)
    panel.set_xlabel("requests at once", fontsize="small")
    panel.axhline(1.0, color="black", linewidth=0.8)
