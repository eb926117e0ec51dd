"""The comparison as a picture: decoding by batch size and forward passes by rows, a panel per weight size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import BITS, OURS, PEERS
from benchmarks.peers.results import Group
from fastdeploy_sd.errors import ConfigError

_PANEL_INCHES = (4.0, 3.2)
_DPI = 120
_CONTEXT = 512


def save_plot(groups: Sequence[Group], path: Path) -> None:
    """Write a PNG: tokens per second over sequences, and milliseconds over rows behind 512 tokens.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: expected matplotlib, got none; pip install 'fastdeploy-sd[bench]'") from None
    bits = [b for b in BITS if any(g.bits == b and g.metric in ("decode", "forward") for g in groups)]
    if not bits:
        return
    width, height = _PANEL_INCHES
    figure = Figure((width * len(bits), height * 2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(bits), squeeze=False)
    for column, name in enumerate(bits):
        panels[0][column].set_title(name)
        for group in groups:
            if group.bits == name and group.metric == "decode":
                _draw_decode(panels[0][column], group)
            elif group.bits == name and group.metric == "forward":
                _draw_forward(panels[1][column], group)
    panels[0][0].set_ylabel("decoding, tokens/s")
    panels[1][0].set_ylabel(f"forward pass behind {_CONTEXT} tokens, ms")
    panels[0][0].legend(fontsize="small")
    figure.suptitle(f"{groups[0].machine['cpu']}, {groups[0].settings['threads']} threads each")
    figure.savefig(path, dpi=_DPI)


def _draw_decode(panel: Any, group: Group) -> None:
    for peer in PEERS:
        cases = [case for name in group.case_names() if (case := group.find(name, peer)) is not None]
        if cases:
            _line(panel, peer, [int(case.case) for case in cases], [case.tokens_per_s() for case in cases])
    panel.set_xlabel("sequences")


def _draw_forward(panel: Any, group: Group) -> None:
    names = [name for name in group.case_names() if name.endswith(f"@{_CONTEXT}")]
    for peer in PEERS:
        cases = [case for name in names if (case := group.find(name, peer)) is not None]
        if cases:
            _line(panel, peer, [case.work for case in cases], [case.median_seconds() * 1e3 for case in cases])
    panel.set_xlabel("rows")
    panel.set_ylim(bottom=0)


def _line(panel: Any, peer: str, xs: Sequence[int], ys: Sequence[float]) -> None:
    """Each peer keeps its colour in all panels."""
    color = f"C{list(PEERS).index(peer)}"
    panel.plot(
        xs, ys, marker="o", markersize=3, color=color, label=PEERS[peer].title, linewidth=2 if peer == OURS else 1
    )
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, [str(x) for x in xs])
