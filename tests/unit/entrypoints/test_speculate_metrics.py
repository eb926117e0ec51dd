"""FastDeploy's figures about drafting, with the right denominators."""

from __future__ import annotations

import pytest

from fastdeploy_sd.entrypoints.openai.usage import speculate_metrics
from fastdeploy_sd.types import DraftCounts


def test_every_figure() -> None:
    counts = DraftCounts(num_verifications=4, num_emitted=9, drafted=(4, 4, 2), reached=(4, 3, 1), accepted=(3, 2, 0))
    assert speculate_metrics(counts, "mtp", is_lossy=False) == {
        "accepted_tokens": 5,
        "rejected_tokens": 5,
        "accept_ratio": 0.5,
        "average_accept_length": 2.25,
        "accepted_tokens_per_head": [3, 2, 0],
        "accept_ratio_per_head": [0.75, pytest.approx(2 / 3), 0.0],
        "method": "mtp",
        "lossy": False,
    }


def test_a_position_that_was_never_reached_and_no_drafts_at_all_have_ratio_0() -> None:
    unreached = speculate_metrics(DraftCounts(1, 1, (1, 1), (1, 0), (0, 0)), "ngram", is_lossy=True)
    assert unreached["accept_ratio_per_head"] == [0.0, 0.0]
    assert unreached["lossy"] is True
    nothing = speculate_metrics(DraftCounts(), "ngram", is_lossy=False)
    assert (nothing["accept_ratio"], nothing["average_accept_length"]) == (0.0, 0.0)
    assert (nothing["accepted_tokens"], nothing["rejected_tokens"], nothing["accepted_tokens_per_head"]) == (0, 0, [])
