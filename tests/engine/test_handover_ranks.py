"""Prompts computed by some ranks and continued by others: the bytes of one process, whatever their numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import compare
from fastdeploy_sd.distributed import executor as ranks
from tests.doubles import faulty_rank_workers as faulty_followers
from tests.engine.handover_pairs import open_pair
from tests.engine.models import References
from tests.engine.test_handover import DECODE, PREFILL, method, with_drafts

pytestmark = pytest.mark.slow

NUM_REQUESTS = 12


@pytest.mark.parametrize(
    ("model", "name", "num_ranks"),
    [
        ("demo", "mtp-ngram", (1, 2)),
        ("demo", "mtp", (2, 4)),
        ("int8 KV", "mtp", (4, 1)),  # two KV heads, so that each is on two ranks
        ("two MTP layers", "mtp", (2, 1)),
        ("gpt_oss-tiny", "mtp", (2, 1)),
        ("qwen3_5-tiny", "mtp", (1, 2)),
        ("qwen3_5-tiny", "naive", (2, 1)),
        # Whose experts are spread on the side that has two ranks, or on both; also those of MTP layers.
        ("seven experts", "mtp", (1, 2)),
        ("seven experts", "mtp-ngram", (2, 1)),
        ("glm4_moe-tiny", "mtp", (2, 2)),
    ],
)
def test_pages_of_any_number_of_ranks_fit_any_other(
    references: References, model: str, name: str, num_ranks: tuple[int, int]
) -> None:
    """num_ranks: of the decode and of the prefill instance."""
    reference, rng, drafting = references.get(model), random.Random(0), method(name)
    requests = reference.requests[:NUM_REQUESTS]
    with open_pair(
        reference,
        (DECODE, drafting),
        (PREFILL, drafting),
        seed=1,
        num_ranks=num_ranks,
        spreads_experts=model in ("seven experts", "glm4_moe-tiny"),
    ) as pair:
        got = pair.run(drafting.apply(requests), rng)
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, got) is None
        stats, source = pair.decode.stats(), pair.prefill.stats()
        # What one instance knows of a common start is not sent, and what the other knows is not computed.
        # A prompt that arrived leaves no snapshot of recurrent states inside, so fewer begin with it.
        least = 0 if model.startswith("qwen3_5") else 1
        assert min(stats.num_prefix_hits, source.num_prefix_hits, pair.wire.num_whole) > least
        assert stats.num_supplied_tokens["prefill"] > 100
        assert pair.wire.num_failed == 0
        assert model != "demo" or (with_drafts(pair) > 0) == drafting.is_drafting


def test_a_layer_leaves_when_every_rank_has_stored_it(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stores late. What is in a page when it is sent is what is in it when the step is over."""
    monkeypatch.setattr(ranks, "DEFAULT_RANK_WORKER", f"{faulty_followers.__name__}:create_slow_stores")
    reference, naive = references.get("demo"), method("naive")
    requests = reference.requests[:3]
    eager = replace(PREFILL, enforce_eager=True)
    with open_pair(reference, (DECODE, naive), (eager, naive), seed=0, num_ranks=(1, 2)) as pair:
        pages, sent, num_early = pair.wire.source_pages, dict[tuple[int, int], bytes](), 0
        assert pages is not None
        send = pair.wire.prefill.send

        def page(layer: int, block: int) -> bytes:
            return b"".join(piece.tobytes() for piece in pages.read_all(layer, [block])[0])

        def watch(transfer_id: str, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
            nonlocal num_early
            num_early += threading.current_thread().name == "fdsd-layers"
            sent.update({(layer, block): page(layer, block) for block in block_ids})
            send(transfer_id, layer, first_block, block_ids)

        def compare_sent() -> None:
            assert all(page(*place) == data for place, data in sent.items())
            sent.clear()

        pair.wire.prefill.send = watch  # type: ignore[method-assign]
        got = pair.run(requests, random.Random(0), each_turn=compare_sent)
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, got) is None
        assert num_early > 0
