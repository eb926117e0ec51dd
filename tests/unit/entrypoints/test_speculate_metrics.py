"""FastDeploy's figures about drafting, with the right denominators."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd.entrypoints.openai.usage import speculate_metrics
from fastdeploy_sd.types import DraftCounts, RequestMetrics


def metrics_of(counts: DraftCounts, *more: Any) -> RequestMetrics:
    return RequestMetrics(1.0, 2.0, 3.0, 4.0, 0, counts, *more)


def test_every_figure() -> None:
    counts = DraftCounts(num_verifications=4, num_emitted=9, drafted=(4, 4, 2), reached=(4, 3, 1), accepted=(3, 2, 0))
    assert speculate_metrics(metrics_of(counts, 8, 12, {"mtp": 5}), "mtp", is_lossy=False) == {
        "accepted_tokens": 5,
        "rejected_tokens": 5,
        "accept_ratio": 0.5,
        "average_accept_length": 2.25,
        "accepted_tokens_per_head": [3, 2, 0],
        "accept_ratio_per_head": [0.75, pytest.approx(2 / 3), 0.0],
        "tokens_per_step": 1.5,
        "accepted_by_source": {"mtp": 5},
        "method": "mtp",
        "lossy": False,
    }


def test_a_position_that_was_never_reached_and_no_drafts_at_all_have_ratio_0() -> None:
    unreached = speculate_metrics(metrics_of(DraftCounts(1, 1, (1, 1), (1, 0), (0, 0))), "ngram", is_lossy=True)
    assert unreached["accept_ratio_per_head"] == [0.0, 0.0]
    assert unreached["lossy"] is True
    nothing = speculate_metrics(metrics_of(DraftCounts()), "ngram", is_lossy=False)
    assert [nothing[name] for name in ("accept_ratio", "average_accept_length", "tokens_per_step")] == [0.0, 0.0, 0.0]
    assert (nothing["accepted_tokens"], nothing["rejected_tokens"], nothing["accepted_tokens_per_head"]) == (0, 0, [])


def test_the_gain_is_told_where_it_was_measured() -> None:
    assert "gain" not in speculate_metrics(metrics_of(DraftCounts()), "auto", is_lossy=False)
    measured = metrics_of(DraftCounts(), 8, 12, {}, 1.25)
    assert speculate_metrics(measured, "auto", is_lossy=False)["gain"] == 1.25
