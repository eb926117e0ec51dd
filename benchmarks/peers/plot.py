"""The comparison as a picture: a row of panels per metric that has records, a panel per weight size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import BITS, OURS, PEERS
from benchmarks.peers.results import Case, Group
from benchmarks.plot import panels

_CONTEXT = 512


def _rate(case: Case) -> float:
    return case.tokens_per_s()


def _milliseconds(case: Case) -> float:
    return case.median_seconds() * 1e3


# Metric -> labels of the axes, the cases' names end in, and what is drawn over their work.
_PLOTTED: Mapping[str, tuple[str, str, str, Callable[[Case], float]]] = {
    "decode": ("sequences", "decoding, tokens/s", "", _rate),
    "forward": ("rows", f"forward pass behind {_CONTEXT} tokens, ms", f"@{_CONTEXT}", _milliseconds),
}


def save_plot(groups: Sequence[Group], path: Path) -> None:
    """Write a PNG of what was measured: tokens per second over sequences, milliseconds over rows behind 512 tokens.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    drawn = {(group.metric, group.bits): group for group in groups if any(_cases(group, peer) for peer in PEERS)}
    metrics = [metric for metric in _PLOTTED if any(key[0] == metric for key in drawn)]
    sizes = [bits for bits in BITS if any(key[1] == bits for key in drawn)]
    if not drawn:
        return
    title = f"{groups[0].machine['cpu']}, {groups[0].settings['threads']} threads each"
    with panels(path, len(metrics), len(sizes), title) as grid:
        for row, metric in enumerate(metrics):
            for column, bits in enumerate(sizes):
                _draw(grid[row][column], drawn.get((metric, bits)), metric)
            grid[row][0].set_ylabel(_PLOTTED[metric][1])
        for panel, bits in zip(grid[0], sizes, strict=True):
            panel.set_title(bits)
        grid[0][0].legend(fontsize="small")


def _cases(group: Group, peer: str) -> list[Case]:
    """What is drawn of a peer: nothing of a metric that is in tables only."""
    if group.metric not in _PLOTTED:
        return []
    names = [name for name in group.case_names() if name.endswith(_PLOTTED[group.metric][2])]
    return [case for name in names if (case := group.find(name, peer)) is not None]


def _draw(panel: Any, group: Group | None, metric: str) -> None:
    if group is None:
        panel.set_axis_off()
        return
    x_label, _, _, value = _PLOTTED[metric]
    for i, peer in enumerate(PEERS):  # each keeps its colour in all panels
        cases = _cases(group, peer)
        if cases:
            xs, ys = [case.work for case in cases], [value(case) for case in cases]
            style = {"color": f"C{i}", "label": PEERS[peer].title, "linewidth": 2 if peer == OURS else 1}
            panel.plot(xs, ys, marker="o", markersize=3, **style)
            panel.set_xscale("log", base=2)
            panel.set_xticks(xs, [str(x) for x in xs])
    panel.set_xlabel(x_label)
    panel.set_ylim(bottom=0)
