"""Prompts computed by some ranks and continued by others: the bytes of one process, whatever their numbers."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.conformance import compare
from tests.engine.handover_pairs import open_pair
from tests.engine.models import References
from tests.engine.test_handover import DECODE, PREFILL, method, with_drafts

NUM_REQUESTS = 12


@pytest.mark.parametrize(
    ("model", "name", "num_ranks"),
    [
        ("demo", "mtp-ngram", (1, 2)),
        ("demo", "naive", (2, 1)),
        ("demo", "mtp", (2, 2)),
        ("demo", "mtp", (2, 4)),
        ("int8 KV", "mtp", (4, 1)),  # two KV heads, so that each is on two ranks
        ("two MTP layers", "mtp", (2, 1)),
    ],
)
def test_pages_of_any_number_of_ranks_fit_any_other(
    references: References, model: str, name: str, num_ranks: tuple[int, int]
) -> None:
    """num_ranks: of the decode and of the prefill instance."""
    reference, rng, drafting = references.get(model), random.Random(0), method(name)
    requests = reference.requests[:NUM_REQUESTS]
    with open_pair(reference, (DECODE, drafting), (PREFILL, drafting), seed=1, num_ranks=num_ranks) as pair:
        got = pair.run(drafting.apply(requests), rng)
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, got) is None
        stats, source = pair.decode.stats(), pair.prefill.stats()
        # What one instance knows of a common start is not sent, and what the other knows is not computed.
        assert min(stats.num_prefix_hits, source.num_prefix_hits, pair.wire.num_whole) > 1
        assert stats.num_supplied_tokens["prefill"] > 100
        assert pair.wire.num_failed == 0
        assert model != "demo" or (with_drafts(pair) > 0) == drafting.is_drafting
