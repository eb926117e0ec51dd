"""Draft layers that were left out for a while draft as if they had never been, whatever happened meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, run_cell
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens, RequestId
from tests.doubles.proposers import RandomLengthProposer
from tests.engine.models import References

pytestmark = pytest.mark.slow

# Request and number of committed tokens -> what the layers drafted.
Seen = dict[tuple[RequestId, int], list[int]]


class RestingProposer:
    """Lets draft layers draft in some steps only, and notes what they drafted; others' drafts are verified.

    In a step of rest it drafts for no row, or for some.

    Args:
        share_of_rest: of the steps, after one in which it rests the next one probably rests too.
    """

    def __init__(self, layers: Proposer, drafts: Proposer, seen: Seen, share_of_rest: float) -> None:
        self._layers, self._drafts, self._seen, self._share = layers, drafts, seen, share_of_rest
        self._random = random.Random(7)
        self._rests = False
        self.num_rests = 0

    @property
    def num_lookahead_slots(self) -> int:
        return self._layers.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._layers.begin(requests)
        self._drafts.begin(requests)

    def propose(self, x: ProposeInput) -> DraftTokens:
        if self._random.random() < 0.2:
            self._rests = self._random.random() < self._share
        resting = np.array([self._rests or self._random.random() < self._share / 4 for _ in x.request_ids], np.bool_)
        self.num_rests += self._rests
        drafts = self._layers.propose(replace(x, max_draft_len=np.where(resting, 0, x.max_draft_len).astype(np.int32)))
        for r, (name, num_tokens) in enumerate(zip(x.request_ids, x.num_tokens.tolist(), strict=True)):
            if len(drafts.row(r)):
                self._seen[name, num_tokens] = drafts.row(r).tolist()
        return self._drafts.propose(x)

    def forget(self, table_rows: I32) -> None:
        self._layers.forget(table_rows)
        self._drafts.forget(table_rows)

    def close(self) -> None:
        """Nothing to save."""


# A prefix cache hands blocks that were filled late to the second pass; preemption and chunks start requests anew.
WAYS = [
    EngineVariant("prefix cache", max_num_seqs=6, enable_prefix_caching=True, num_passes=2, must_hit=True),
    EngineVariant(
        "preemption, chunks", max_num_seqs=8, num_blocks=14, max_num_batched_tokens=24, long_prefill_token_threshold=7,
        enable_prefix_caching=True, num_passes=2, must_preempt=True,
    ),
    EngineVariant("eager", max_num_seqs=6, enforce_eager=True, num_requests=12),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("model", ["demo", "two MTP layers"])
def test_layers_that_rested_draft_as_if_they_had_not(references: References, model: str, way: EngineVariant) -> None:
    k = 2 if model == "two MTP layers" else 4
    always, sometimes = drafts_of(references, model, way, k, 0.0), drafts_of(references, model, way, k, 0.8)
    both = always.keys() & sometimes.keys()
    assert both  # how many is up to the times of steps, which share prompts out
    assert len(sometimes) < 0.8 * len(always)
    shared = {key: min(len(always[key]), len(sometimes[key])) for key in both}
    assert {key: always[key][:n] for key, n in shared.items()} == {key: sometimes[key][:n] for key, n in shared.items()}


def drafts_of(references: References, model: str, way: EngineVariant, k: int, share_of_rest: float) -> Seen:
    """What the layers drafted, resting in about this share of the steps, while others' drafts were verified."""
    reference, known, seen = references.get(model), references.known(model), Seen()
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=k, num_model_steps=k)
    method = Method(
        "resting",
        config,
        lambda config, context: RestingProposer(
            create_proposer(config, context), RandomLengthProposer(known, context.vocab_size), seen, share_of_rest
        ),
    )
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    return seen
