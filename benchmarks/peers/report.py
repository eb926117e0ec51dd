"""Tables and a picture of a comparison: speeds at equal bits, and this server's against the best peer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import markdown_table
from benchmarks.peers.catalogue import BITS, METRICS, OURS, PEERS
from benchmarks.peers.results import Case, Group, speed_ratios
from benchmarks.plot import panels
from fastdeploy_sd.errors import ConfigError

_TITLES = {
    "decode": "Decoding, tokens per second of all sequences together, by number of sequences",
    "prefill": "Prompt, tokens per second until the first token, by length",
    "forward": "Forward pass over M rows, ms (against M = 1), by M",
    "http": "Over HTTP, output tokens per second from the first request to the last token, by requests in flight",
    "speculation": "Speculation over a text to be copied with edits, one request at a time, tokens per second",
}
_RATIO = "**ours / best peer**"
# Other programs' load that hardly changes a figure.
_QUIET_CPUS = 0.2
_TEXT_NAME, _PLOT_NAME = "results.md", "results.png"

Cell = Callable[[Group, Case], str]


def write_report(folder: Path) -> str:
    """Write results.md and, where matplotlib is installed, results.png into the folder of records; the tables.

    Raises:
        ConfigError: there are no records.
    """
    groups = Group.load_all(folder)
    text = tables(groups)
    (folder / _TEXT_NAME).write_text(text + "\n", encoding="utf-8")
    try:
        save_plot(groups, folder / _PLOT_NAME)
    except ConfigError as error:
        text += f"\n\n{error.message}"
    return text


def tables(groups: Sequence[Group]) -> str:
    """All tables, with what they were measured on and why cells are empty."""
    parts = [_machine(groups)]
    for metric in METRICS:
        of_metric = sorted((g for g in groups if g.metric == metric), key=lambda g: BITS.index(g.bits))
        if of_metric:
            parts += _metric_tables(metric, of_metric)
    return "\n\n".join([*parts, *_failures(groups)])


def _metric_tables(metric: str, groups: Sequence[Group]) -> list[str]:
    title = _TITLES[metric]
    if metric == "speculation":
        return [f"**{title}**", _speculation_table(groups)]
    if metric != "forward":
        names = list(dict.fromkeys(name for g in groups for name in g.case_names()))
        return [f"**{title}**", _table(groups, {name: name for name in names}, _rate_cell)]
    parts = []
    for context in dict.fromkeys(name.partition("@")[2] for g in groups for name in g.case_names()):
        rows = dict.fromkeys(n.partition("@")[0] for g in groups for n in g.case_names() if n.endswith(f"@{context}"))
        columns = {row: f"{row}@{context}" for row in rows}
        parts += [f"**{title}, after {context} tokens**", _table(groups, columns, _forward_cell)]
    return parts


def _table(groups: Sequence[Group], columns: dict[str, str], cell: Cell) -> str:
    """A table of `columns`: heading -> case; a row per peer, and one for the ratio to the best of them."""
    rows: list[list[object]] = []
    for group in groups:
        for peer in _peers(group):
            found = [group.find(case, peer) for case in columns.values()]
            cells = [None if case is None else cell(group, case) for case in found]
            rows.append([group.bits, _peer_text(group, peer), *cells])
        ratios = [_ratio_cell(group.find(case, OURS), _best_peer(group, case)) for case in columns.values()]
        rows.append([group.bits, _RATIO, *ratios])
    return markdown_table(["Weights", "", *columns], rows)


def _speculation_table(groups: Sequence[Group]) -> str:
    """Each peer with its best way of drafting."""
    rows: list[list[object]] = []
    for group in groups:
        best = {}
        for peer in _peers(group):
            tried = [case for name in group.case_names() if (case := group.find(name, peer)) is not None]
            cells: list[object] = [None, None]
            if tried:
                best[peer] = max(tried, key=Case.tokens_per_s)
                cells = [best[peer].case, f"{best[peer].tokens_per_s():.1f}"]
            rows.append([group.bits, _peer_text(group, peer), *cells])
        others = [case for peer, case in best.items() if peer != OURS]
        ratio = _ratio_cell(best.get(OURS), max(others, key=Case.tokens_per_s, default=None))
        rows.append([group.bits, _RATIO, "", ratio])
    return markdown_table(["Weights", "", "Drafting", "tokens/s"], rows)


def _rate_cell(group: Group, case: Case) -> str:
    del group
    return f"{case.tokens_per_s():.1f}"


def _forward_cell(group: Group, case: Case) -> str:
    """Milliseconds, and against one row of the same round."""
    one = group.find(f"1@{case.case.partition('@')[2]}", case.peer)
    text = f"{case.median_seconds() * 1e3:.1f}"
    if one is None:
        return text
    times = zip(case.round_seconds(), one.round_seconds(), strict=True)
    return f"{text} ({median(many / single for many, single in times):.2f})"


def _best_peer(group: Group, case: str) -> Case | None:
    found = [c for peer in _peers(group) if peer != OURS and (c := group.find(case, peer)) is not None]
    return max(found, key=Case.tokens_per_s, default=None)


def _ratio_cell(ours: Case | None, best: Case | None) -> str | None:
    """Median of the ratios within a round, and their range."""
    if ours is None or best is None:
        return None
    ratios = speed_ratios(ours, best)
    return f"**{median(ratios):.2f}x** {min(ratios):.2f}-{max(ratios):.2f} ({PEERS[best.peer].title})"


def _peers(group: Group) -> list[str]:
    """Of the group, in the catalogue's order."""
    return [peer for peer in PEERS if peer in group.peers]


def _peer_text(group: Group, peer: str) -> str:
    info = group.peers[peer]
    parts = [info["format"], f"KV {info['kv_type']}" if info["kv_type"] else None]
    detail = ", ".join(part for part in parts if part)
    return PEERS[peer].title + (f" ({detail})" if detail else "")


def _machine(groups: Sequence[Group]) -> str:
    machines = dict.fromkeys(
        f"{g.machine['cpu']}, {g.machine['num_cpus']} CPUs, {g.settings['threads']} threads each" for g in groups
    )
    states = [state for group in groups for state in group.rounds]
    versions = {name: v for g in groups for info in g.peers.values() for name, v in info["versions"].items()}
    lines = [
        f"{' and '.join(machines)}; measured {_provenance(groups)}.",
        f"Before the rounds: read bandwidth {_span(states, 'read_gb_per_s')} GB/s, float32 products"
        f" {_span(states, 'matmul_gflops')} GFLOP/s, other programs {_span(states, 'foreign_cpus')} CPUs.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".",
    ]
    busy = [state["foreign_cpus"] for state in states if state["foreign_cpus"] > _QUIET_CPUS]
    if busy:
        lines.append(
            f"**The machine was not quiet: before {len(busy)} of {len(states)} rounds other programs used more than"
            f" {_QUIET_CPUS} CPUs. Peers that wait by spinning suffer most; do not quote figures of such a run.**"
        )
    return "\n".join(lines)


def _provenance(groups: Sequence[Group]) -> str:
    """When and at which revision; of several revisions, which records are of each."""
    of_revision: dict[str, list[Group]] = {}
    for group in groups:
        of_revision.setdefault(group.git_sha or "unknown", []).append(group)
    parts = []
    for name, measured in of_revision.items():
        dates = sorted({group.created for group in measured})
        text = " to ".join(dict.fromkeys([dates[0], dates[-1]])) + f", revision {name}"
        parts.append(text if len(of_revision) == 1 else f"{text} ({', '.join(g.file_name for g in measured)})")
    return "; ".join(parts)


def _span(states: Sequence[dict[str, float]], name: str) -> str:
    values = [state[name] for state in states]
    return f"{min(values):.2f} to {max(values):.2f} (median {median(values):.2f})" if values else "-"


def _failures(groups: Sequence[Group]) -> list[str]:
    """Why cells are empty: a line per peer and reason, with the places."""
    places: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        for peer, info in group.peers.items():
            if info["failed"]:
                places.setdefault((peer, info["failed"]), []).append(group.file_name)
        for case in group.cases:
            if case.failed:
                places.setdefault((case.peer, case.failed), []).append(f"{group.file_name} {case.case}")
    lines = [f"- {PEERS[peer].title}: {reason} ({', '.join(names)})" for (peer, reason), names in places.items()]
    return ["Empty cells:\n\n" + "\n".join(lines)] if lines else []


_CONTEXT = 512


def _rate(case: Case) -> float:
    return case.tokens_per_s()


def _milliseconds(case: Case) -> float:
    return case.median_seconds() * 1e3


# Metric -> labels of the axes, the cases' names end in, and what is drawn over their work.
_PLOTTED: Mapping[str, tuple[str, str, str, Callable[[Case], float]]] = {
    "decode": ("sequences", "decoding, tokens/s", "", _rate),
    "forward": ("rows", f"forward pass after {_CONTEXT} tokens, ms", f"@{_CONTEXT}", _milliseconds),
}


def save_plot(groups: Sequence[Group], path: Path) -> None:
    """Write a PNG of what was measured: tokens per second over sequences, milliseconds over rows after 512 tokens.

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
