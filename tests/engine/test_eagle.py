"""EAGLE heads and DFlash: right drafts wherever KV and rows come from, and the bytes of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, compare, quick_variants, run_cell
from fastdeploy_sd.config import ParallelConfig, SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.types import Speculation, TokenLogprob
from tests.doubles.proposers import RandomLengthProposer, ReplacedDrafts
from tests.engine.handover_pairs import open_pair
from tests.engine.models import CHECKPOINTS, References
from tests.engine.test_handover import DECODE, PREFILL
from tests.engine.test_swap import check, swapping
from tests.models.dflash_heads import HEADS, make_head
from tests.models.eagle_heads import EagleHead, target_path
from tests.models.mtp_runs import Event, make_engine, make_requests, run

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


def count_right(head: EagleHead, events: Sequence[Event], texts: dict[str, list[int]]) -> int:
    """Compare drafts with the formulas; returns how many cannot be others."""
    hidden = {request_id: head.hidden(np.array(text, np.int32)) for request_id, text in texts.items()}
    sure = 0
    for event in events:
        wanted = head.drafts(event.text, len(event.drafts), hidden[event.request_id][: len(event.text) - 1])
        assert event.drafts.tolist() == wanted.token_ids or wanted.margin < _SURE
        sure += len(event.drafts) * (wanted.margin >= _SURE)
    return sure


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "together") for name in HEADS),
        *((name, way) for name in ("eagle3 of SGLang", "p-eagle", "dflash") for way in list(WAYS)[1:]),
    ],
)
def test_drafts_are_those_of_the_formulas(heads: dict[str, EagleHead], name: str, way: str) -> None:
    head = heads[name]
    engine, recorder = make_engine(target_path(), K, method=head.head.method, model=str(head.path), **WAYS[way])
    texts = run(engine, make_requests(PROMPTS, 10, ignore_eos=True))
    assert (engine.stats().num_preemptions > 0) == (way == "preemption")
    assert count_right(head, recorder.events, texts) > 60


@pytest.mark.parametrize("name", ["eagle", "eagle3 of speculators", "eagle3 of two layers", "p-eagle", "dflash"])
def test_drafts_after_accepted_ones_and_after_prefix_hits_are_those_of_the_formulas(
    heads: dict[str, EagleHead], name: str
) -> None:
    """The first draft after a hit needs what the head reads of the token before it."""
    head = heads[name]
    options: dict[str, Any] = {"method": head.head.method, "model": str(head.path), "enable_prefix_caching": True}
    engine, recorder = make_engine(target_path(), K, **options)
    requests = make_requests(PROMPTS, 14, ignore_eos=True)
    texts = run(engine, requests)
    again = [replace(request, request_id=f"{request.request_id} again") for request in requests]
    texts |= {request.request_id: texts[request.request_id.split()[0]] for request in again}
    recorder.continuations, recorder.habit = texts, (0, K, 1, 3)
    assert run(engine, again) == {request.request_id: texts[request.request_id] for request in again}
    stats = engine.stats()
    assert (stats.num_prefix_hits, stats.num_accepted_tokens > 20) == (2, True)
    assert stats.num_prefix_lost_tokens == 0
    first = {(r.request_id, len(r.prompt_token_ids) + 1) for r in again}
    assert first <= {(event.request_id, len(event.text)) for event in recorder.events if len(event.drafts) == K}
    assert count_right(head, recorder.events, texts) > 100


@pytest.mark.parametrize("name", ["eagle3", "p-eagle"])
def test_log_probabilities_of_drafts_are_over_the_drafts_own_vocabulary(heads: dict[str, EagleHead], name: str) -> None:
    head = heads[name]
    engine, recorder = make_engine(target_path(), K, method="eagle3", model=str(head.path), enable_draft_logprob=True)
    [request] = make_requests([PROMPTS[3]], 6, ignore_eos=True)
    engine.submit(replace(request, speculation=Speculation(num_draft_logprobs=2)))
    found: list[TokenLogprob] = []
    while engine.has_work():
        for output in engine.step():
            found += [verified.draft for verified in output.draft_logprobs or ()]
    first = recorder.events[0]
    wanted = head.drafts(first.text, K, head.hidden(first.text[:-1]))
    assert wanted.margin > _SURE
    assert [logprob.token_id for logprob in found[:K]] == wanted.token_ids
    assert [logprob.top_token_ids[0] for logprob in found[:K]] == wanted.token_ids
    np.testing.assert_allclose([logprob.logprob for logprob in found[:K]], wanted.logprobs, atol=1e-4)


def column(references: References, folder: Path, name: str, model: str = "float32") -> Method:
    """A head for a model whose KV is filled along, and drafts of which many are right."""
    head, known = make_head(folder, name, CHECKPOINTS.get(model, model)), references.known(model)
    return Method(
        name,
        SpeculativeConfig(head.head.method, K, model=str(head.path), num_model_steps=K),
        lambda config, context: ReplacedDrafts(create_proposer(config, context), RandomLengthProposer(known, 4096)),
    )


@pytest.mark.parametrize("way", [quick_variants()[1], quick_variants()[4]], ids=lambda way: way.name)
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("float32", "eagle"),
        ("qwen3-tiny", "eagle3 of SGLang"),
        ("float32", "p-eagle"),
        ("qwen3-tiny", "p-eagle of speculators"),
        ("float32", "dflash"),
        ("qwen3-tiny", "dflash of speculators"),
    ],
)
def test_same_tokens_as_plain_decoding(
    references: References, tmp_path: Path, model: str, name: str, way: EngineVariant
) -> None:
    reference, method = references.get(model), column(references, tmp_path, name, model)
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("float32", "eagle3 of two layers"),
        ("qwen3-tiny", "p-eagle of speculators"),
        ("qwen3-tiny", "dflash of speculators"),
    ],
)
def test_same_tokens_with_trees(references: References, tmp_path: Path, model: str, name: str) -> None:
    """Also where a pass makes all drafts, and where a head has logits for some tokens only."""
    reference, head, num_drafts = references.get(model), make_head(tmp_path, name, CHECKPOINTS.get(model, model)), []
    for draft_trees, k in ((False, K), (True, 3 * K)):
        config = SpeculativeConfig(
            head.head.method, k, model=str(head.path), num_model_steps=K, draft_trees=draft_trees
        )
        cell = run_cell(
            reference.base, quick_variants()[4], Method(name, config), reference.requests, reference.answers
        )
        assert (cell.difference, cell.missing) == (None, None)
        num_drafts.append(cell.num_drafts)
    assert num_drafts[1] > 2 * num_drafts[0] > 0


@pytest.mark.parametrize("name", ["eagle3 of SGLang", "p-eagle", "dflash"])
def test_same_tokens_on_two_ranks(references: References, tmp_path: Path, name: str) -> None:
    reference, way = references.get("float32"), replace(quick_variants()[4], num_requests=12)
    base = replace(reference.base, parallel=ParallelConfig(tensor_parallel_size=2, rank_timeout_s=60.0))
    requests = reference.requests[: way.num_requests]
    answers = {r.request_id: reference.answers[r.request_id] for r in requests}
    cell = run_cell(base, way, column(references, tmp_path, name), requests, answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


@pytest.mark.parametrize("name", ["eagle3 of two layers", "dflash"])
def test_same_tokens_over_a_second_level(references: References, tmp_path: Path, name: str) -> None:
    reference = references.get("float32")
    with swapping(reference, column(references, tmp_path, name)) as engine:
        check(reference, engine, reference.requests[:8])
        assert engine.stats().swap.num_loaded > 10


@pytest.mark.parametrize("name", ["eagle3 of two layers", "dflash"])
def test_same_tokens_on_two_instances(references: References, tmp_path: Path, name: str) -> None:
    reference, method = references.get("float32"), column(references, tmp_path, name)
    with open_pair(reference, (DECODE, method), (PREFILL, method), seed=1) as pair:
        assert compare(reference.answers, pair.run(reference.requests, random.Random(0))) is None
        assert pair.decode.stats().num_supplied_tokens["prefill"] > 500
        assert pair.wire.num_failed == 0


@pytest.mark.parametrize("name", ["eagle3", "p-eagle", "dflash"])
def test_as_a_source_of_auto_it_changes_no_token(references: References, tmp_path: Path, name: str) -> None:
    reference, head = references.get("float32"), make_head(tmp_path, name, CHECKPOINTS["float32"])
    config = SpeculativeConfig(
        "auto", 6, auto_with_draft_model=True, draft_method=head.head.method, model=str(head.path), num_model_steps=K
    )
    asked = Speculation(), Speculation(method=head.head.method), Speculation(method="ngram"), Speculation(enabled=False)
    method = Method("auto", config, speculations=asked)
    cell = run_cell(reference.base, quick_variants()[4], method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0
