"""The method that chooses, with draft layers among its sources: it changes no token, whenever the layers are asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, run_cell
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, Speculation
from tests.engine.models import References

pytestmark = pytest.mark.slow

WAYS = [
    EngineVariant("prefix cache", max_num_seqs=6, enable_prefix_caching=True, num_passes=2, must_hit=True),
    EngineVariant(
        "preemption, chunks", max_num_seqs=8, num_blocks=14, max_num_batched_tokens=24, long_prefill_token_threshold=7,
        enable_prefix_caching=True, num_passes=2, must_preempt=True,
    ),
    EngineVariant("alone", max_num_seqs=1, num_requests=6),
    EngineVariant("eager", max_num_seqs=6, enforce_eager=True, num_requests=12),
]  # fmt: skip
# Of five requests one forces the layers, one forces them for one draft, and two do without them.
SPECULATIONS = (
    Speculation(),
    Speculation(method="mtp"),
    Speculation(method="ngram"),
    Speculation(method="mtp", num_speculative_tokens=1),
    Speculation(enabled=False),
)


class Counting:
    """Counts drafts by source."""

    def __init__(self, method: Proposer) -> None:
        self._method = method
        self.num_drafts = dict.fromkeys(DraftSource, 0)

    @property
    def num_lookahead_slots(self) -> int:
        return self._method.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._method.begin(requests)

    def propose(self, x: ProposeInput) -> DraftTokens:
        drafts = self._method.propose(x)
        assert (np.diff(drafts.cu_num_draft) <= x.max_draft_len).all()
        for source in [] if drafts.sources is None else drafts.sources.tolist():
            self.num_drafts[DraftSource(source)] += 1
        return drafts

    def forget(self, table_rows: I32) -> None:
        self._method.forget(table_rows)

    def close(self) -> None:
        self._method.close()


CASES = [(way, SPECULATIONS) for way in WAYS] + [(WAYS[0], ())]


@pytest.mark.parametrize(("way", "speculations"), CASES, ids=[f"{way.name}-{len(asked)}" for way, asked in CASES])
@pytest.mark.parametrize("model", ["demo", "two MTP layers", "qwen3_5-tiny"])
def test_layers_as_a_source_change_no_token(
    references: References, model: str, way: EngineVariant, speculations: tuple[Speculation, ...]
) -> None:
    reference, made = references.get(model), list[Counting]()

    def make(config: SpeculativeConfig, context: object) -> Counting:
        made.append(Counting(create_proposer(config, context)))  # type: ignore[arg-type]
        return made[-1]

    num_steps = 2 if model == "two MTP layers" else 3
    config = SpeculativeConfig("auto", num_speculative_tokens=6, auto_with_mtp=True, num_model_steps=num_steps)
    method = Method("auto with layers", config, make, speculations)
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert made[0].num_lookahead_slots == num_steps
    # Where the layers are not forced, the times of calls and steps decide whether they are asked.
    assert made[0].num_drafts[DraftSource.MTP] > 0 or not speculations
