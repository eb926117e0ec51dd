"""The metrics of experts that are spread over ranks; without any they have no samples."""

from __future__ import annotations

from fastdeploy_sd.metrics.family import ByLabels, Labelled, Single
from fastdeploy_sd.types.stats import EngineStats


def _rows(stats: EngineStats) -> dict[tuple[str, ...], float]:
    found = {} if stats.experts is None else stats.experts.num_rows
    return {(str(rank), str(layer)): count for rank, rows in found.items() for layer, count in enumerate(rows)}


EXPERT_ROWS = (
    ByLabels(
        "fastdeploy_sd:expert_rows",
        "Rows on which a rank has run its experts, one per token and expert, by rank and layer; layers with experts "
        "are numbered, the target's first.",
        ("rank", "layer"),
        _rows,
    ),
)
EXPERT_COUNTERS = (
    Single(
        "fastdeploy_sd:expert_moves",
        "Copies of experts that have come to a rank, to balance rows; the first engine counts them.",
        lambda s: None if s.experts is None else s.experts.num_moves,
    ),
)
EXPERT_GAUGES = (
    Single(
        "fastdeploy_sd:expert_moves_under_way",
        "Copies of experts on their way to a rank.",
        lambda s: None if s.experts is None else s.experts.num_moving,
    ),
)
EXPERT_LABELLED_GAUGES = (
    Labelled(
        "fastdeploy_sd:expert_balancedness",
        "Mean rows of ranks by the most that one had in the last 10 seconds, 1 = all alike, by layer; the first engine "
        "tells it.",
        "layer",
        lambda s: {} if s.experts is None else {str(i): value for i, value in s.experts.balancedness.items()},
    ),
)
