"""EAGLE heads: right drafts wherever their KV and the target's rows come from, and the bytes of plain decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.eagle_heads import HEADS, EagleHead, make_head, target_path
from tests.models.mtp_runs import make_engine, make_requests, run

pytestmark = pytest.mark.slow

K = 4
PROMPTS = [np.random.default_rng(n).integers(4, 4096, n).astype(np.int32) for n in (3, 16, 17, 40)]
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "eager": {"enforce_eager": True},
    "chunks": {"long_prefill_token_threshold": 7, "max_num_batched_tokens": 40},
    "preemption": {"num_blocks": 7, "enable_prefix_caching": True},
}
_SURE = 1e-3  # by which a logit must lead where other sums may give another draft


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EagleHead]:
    folder = tmp_path_factory.mktemp("eagle")
    return {name: make_head(folder, name) for name in HEADS}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "together") for name in HEADS), *(("eagle3 of SGLang", way) for way in list(WAYS)[1:])]
)
def test_drafts_are_those_of_the_formulas(heads: dict[str, EagleHead], name: str, way: str) -> None:
    head = heads[name]
    engine, recorder = make_engine(target_path(), K, method=head.head.method, model=str(head.path), **WAYS[way])
    texts = run(engine, make_requests(PROMPTS, 10, ignore_eos=True))
    assert (engine.stats().num_preemptions > 0) == (way == "preemption")
    hidden = {request_id: head.hidden(np.array(text, np.int32)) for request_id, text in texts.items()}
    sure = 0
    for event in recorder.events:
        wanted, margin = head.drafts(event.text, len(event.drafts), hidden[event.request_id][: len(event.text) - 1])
        assert event.drafts.tolist() == wanted or margin < _SURE
        sure += len(wanted) * (margin >= _SURE)
    assert sure > 60
