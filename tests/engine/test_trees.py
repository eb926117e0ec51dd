"""The promise for drafts that branch: tokens and log-probabilities are those of plain decoding, bit for bit.

The right tokens are hidden at random places of random trees. Small trees go through every model in test_exactness.py.
"""

from __future__ import annotations

import pathlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pytest

from fastdeploy_sd.cli.verify import (
    ALONE,
    PLAIN,
    EngineVariant,
    Method,
    Reference,
    compare,
    make_reference,
    open_engine,
    quick_variants,
    run_alone,
    run_cell,
)
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.types import Request
from tests.doubles.proposers import RandomTreeProposer, WrongTreeProposer
from tests.engine.guided_requests import guided_requests
from tests.engine.handover_pairs import open_pair
from tests.engine.models import References
from tests.engine.test_exactness import OTHER_WAYS
from tests.engine.test_handover import DECODE, PREFILL
from tests.engine.test_ranks import on_ranks
from tests.engine.test_swap import check as check_passes
from tests.engine.test_swap import swapping
from tests.engine.test_windows import WAYS as WINDOW_WAYS
from tests.engine.test_windows import configure

pytestmark = pytest.mark.slow

_VOCAB_SIZE = 4096
NUM_REQUESTS = 16
CHUNKS = quick_variants()[1]
LARGE = EngineVariant("large trees", max_num_seqs=6, enable_prefix_caching=True, num_passes=2, must_hit=True)


def known_texts(requests: Sequence[Request], answers: Mapping[str, object]) -> dict[str, list[int]]:
    """Prompt and answer of every request, also where it comes again."""
    texts = {r.request_id: [*r.prompt_token_ids.tolist(), *answers[r.request_id].token_ids] for r in requests}  # type: ignore[attr-defined]
    return texts | {f"{name}-again-{n}": text for name, text in texts.items() for n in (1, 2)}


def trees(reference: Reference, num_drafts: int, kind: type[RandomTreeProposer] = RandomTreeProposer) -> Method:
    """A method that drafts random trees of at most so many nodes."""
    texts = known_texts(reference.requests, reference.answers)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts)
    return Method(f"{kind.__name__} k={num_drafts}", speculative, lambda *_: kind(texts, _VOCAB_SIZE))


def first(reference: Reference, count: int = NUM_REQUESTS) -> Reference:
    requests = reference.requests[:count]
    answers = {r.request_id: reference.answers[r.request_id] for r in requests}
    return replace(reference, requests=requests, answers=answers)


def check(reference: Reference, way: EngineVariant, method: Method) -> None:
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 50
    assert (cell.num_accepted > 0) == (not method.name.startswith("Wrong"))


@pytest.mark.parametrize(("model", "num_drafts"), [("demo", 63), ("qwen3-tiny", 31), ("int8 KV", 15)])
def test_same_tokens_with_large_trees(references: References, model: str, num_drafts: int) -> None:
    reference = first(references.get(model))
    check(reference, LARGE, trees(reference, num_drafts))


def test_same_tokens_with_trees_that_are_wrong(references: References) -> None:
    reference = first(references.get("demo"), 8)
    check(reference, ALONE, trees(reference, 12, WrongTreeProposer))


def test_same_tokens_with_grammars(references: References) -> None:
    """Each node of a tree has the mask that follows its path."""
    base = references.get("demo").base
    with open_engine(base, ALONE, PLAIN) as engine:
        requests = tuple(guided_requests(NUM_REQUESTS, engine.model_info.eos_token_ids))
    reference = Reference(base, requests, run_alone(base, requests))
    check(reference, OTHER_WAYS[1], trees(reference, 12))


def test_same_tokens_on_two_ranks(references: References) -> None:
    reference = first(references.get("demo"))
    check(replace(reference, base=on_ranks(reference.base, 2)), CHUNKS, trees(reference, 12))


def test_same_tokens_with_blocks_that_went_and_came_back(references: References) -> None:
    """The other rank has moved its part of a path before the first one copies it."""
    reference = first(references.get("demo"), 8)
    method = trees(reference, 12)
    with swapping(reference, method, num_ranks=2) as engine:
        check_passes(reference, engine, method.apply(reference.requests))
        assert engine.stats().swap.num_loaded > 10


def test_same_tokens_where_layers_have_windows(tmp_path: pathlib.Path) -> None:
    """A row of a tree has the window of its position, and accepted paths are moved in every KV group."""
    reference = make_reference(configure(tmp_path), seed=3, count=12)
    check(reference, WINDOW_WAYS[0], trees(reference, 12))


def test_two_engines_give_the_bytes_of_one(references: References) -> None:
    """The first instance hands over a chain, the other verifies trees."""
    reference = first(references.get("demo"))
    method = trees(reference, 12)
    with open_pair(reference, (DECODE, method), (PREFILL, trees(reference, 4)), seed=1) as pair:
        answers = pair.run(method.apply(reference.requests), random.Random(0))
        assert compare(reference.answers, answers) is None


@pytest.mark.parametrize("strategy", ["greedy", "topp"])
def test_other_strategies_take_trees_or_their_first_chains(
    references: References, strategy: Literal["greedy", "topp"]
) -> None:
    """At temperature 0 both give the output of plain decoding."""
    reference = first(references.get("demo"), 36)
    requests = tuple(r for r in reference.requests if r.sampling.temperature == 0)
    reference = replace(reference, requests=requests)
    method = trees(reference, 8)
    speculative = replace(method.speculative, verify_strategy=strategy)
    check(reference, CHUNKS, replace(method, speculative=speculative))
