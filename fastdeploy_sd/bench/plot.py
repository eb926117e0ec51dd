"""The speculation benchmark as a picture: speed-up and acceptance length by method and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_sd.bench.prompts import WORKLOADS
from fastdeploy_sd.bench.record import Record
from fastdeploy_sd.errors import ConfigError

_PANEL_INCHES = (4.0, 3.2)
_DPI = 120
_GROUP_WIDTH = 0.8
_ROWS = (("speed_up", "speed-up over naive"), ("acceptance_length", "acceptance length, tokens"))


def save_plot(records: Sequence[Record], path: Path, title: str) -> None:
    """Write a PNG: a column of panels per workload, a group of bars per method, a bar per batch size.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: expected matplotlib, got none; pip install 'fastdeploy-sd[bench]'") from None
    workloads = [w for w in WORKLOADS if any(r.workload["workload"] == w for r in records)]
    width, height = _PANEL_INCHES
    figure = Figure((width * len(workloads), height * len(_ROWS)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(_ROWS), len(workloads), squeeze=False, sharey="row")
    for row, (metric, label) in enumerate(_ROWS):
        for column, workload in enumerate(workloads):
            _draw(panels[row][column], [r for r in records if r.workload["workload"] == workload], metric)
        panels[row][0].set_ylabel(label)
    for panel, workload in zip(panels[0], workloads, strict=True):
        panel.set_title(workload)
    figure.suptitle(title)
    panels[0][-1].legend(title="batch", fontsize="small")
    figure.savefig(path, dpi=_DPI)


def _draw(panel: Any, records: Sequence[Record], metric: str) -> None:
    methods = list(dict.fromkeys(r.workload["method"] for r in records))
    batches = sorted({r.workload["batch"] for r in records})
    bar = _GROUP_WIDTH / len(batches)
    for i, batch in enumerate(batches):
        values = {r.workload["method"]: r.metrics for r in records if r.workload["batch"] == batch}
        shown = [(x, values[method]) for x, method in enumerate(methods) if method in values]
        places = [x + (i - (len(batches) - 1) / 2) * bar for x, _ in shown]
        panel.bar(places, [m[metric] for _, m in shown], bar, label=str(batch))
        if metric == "speed_up":
            spans = [[m[metric] - m["speed_up_min"], m["speed_up_max"] - m[metric]] for _, m in shown]
            heights = [m[metric] for _, m in shown]
            panel.errorbar(places, heights, list(zip(*spans, strict=True)), fmt="none", ecolor="black", elinewidth=0.8)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(methods)), methods, rotation=30, ha="right", fontsize="small")
