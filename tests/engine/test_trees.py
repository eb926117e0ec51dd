"""The promise for drafts that branch: tokens and log-probabilities are those of plain decoding, bit for bit.

The right tokens are hidden at random places of random trees. Small trees go through every model in test_exactness.py.
"""

from __future__ import annotations

import pathlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

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
from fastdeploy_sd.config import SpeculativeConfig, demo_drafter
from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample
from fastdeploy_sd.spec_decode.dispatcher import MethodDispatcher
from fastdeploy_sd.spec_decode.proposer import ProposeInput, ProposerContext
from fastdeploy_sd.types import DraftTokens, Request, Speculation
from fastdeploy_sd.types.draft_methods import METHODS
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


@pytest.mark.parametrize(
    ("model", "num_drafts"), [("demo", 63), ("qwen3-tiny", 31), ("int8 KV", 15), ("deepseek_v3-tiny", 31)]
)
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


FREE_DRAFTS = CostProfile({}, {}, (StepSample(1, 1, 0, 1.0), StepSample(512, 1, 0, 1.01)))


class WitnessOfTrees(MethodDispatcher):
    """The server's methods; counts trees, and texts that went on with a branch."""

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        context.step_stats.profile = FREE_DRAFTS  # for `auto`: with costs it may take chains alone
        super().__init__(config, context)
        self.num_trees = 0
        self.num_right_branches_of: Counter[int | None] = Counter()  # by their sources
        self._latest: dict[tuple[str, int], tuple[int, DraftTokens, int]] = {}

    @property
    def num_right_branches(self) -> int:
        return self.num_right_branches_of.total()

    def propose(self, x: ProposeInput) -> DraftTokens:
        for name, table_row, end in zip(x.request_ids, x.table_rows.tolist(), x.num_tokens.tolist(), strict=True):
            begin, drafts, r = self._latest.pop((name, table_row), (0, DraftTokens.none(1), 0))
            text, last, depth = x.token_table[table_row, begin:end].tolist(), -1, 0
            for i, (token_id, parent) in enumerate(zip(drafts.row(r).tolist(), drafts.parents_of(r), strict=True)):
                if parent == last and depth < len(text) and token_id == text[depth]:
                    source = None if drafts.sources is None else drafts.sources.item(drafts.cu_num_draft.item(r) + i)
                    self.num_right_branches_of[source] += i != last + 1
                    last, depth = i, depth + 1
        found = super().propose(x)
        self.num_trees += int((~found.is_chain).sum())
        for r, (name, table_row, end) in enumerate(
            zip(x.request_ids, x.table_rows.tolist(), x.num_tokens.tolist(), strict=True)
        ):
            self._latest[name, table_row] = (end, found, r)
        return found


def check_method(reference: Reference, way: EngineVariant, name: str, num_drafts: int, **more: Any) -> WitnessOfTrees:
    """Run the requests with trees of a method, `more` being further keys; returns what it drafted."""
    made: list[WitnessOfTrees] = []

    def make(config: SpeculativeConfig, context: ProposerContext) -> WitnessOfTrees:
        made.append(WitnessOfTrees(config, context))
        return made[-1]

    config = SpeculativeConfig(
        name, num_drafts, draft_trees=True, min_ngram_size=1, suffix_decoding_min_token_prob=0.01, **more
    )
    check(reference, way, Method(f"{name} trees", config, make))
    return made[0]


@pytest.mark.parametrize("name", ["ngram", "suffix", "auto"])
@pytest.mark.parametrize("model", ["demo", "qwen3-tiny"])
def test_same_tokens_with_trees_of_a_method(references: References, model: str, name: str) -> None:
    """Greedy and seeded requests, with penalties and log-probabilities."""
    witness = check_method(first(references.get(model), 36), LARGE, name, 15)
    assert witness.num_trees > 0


@pytest.mark.parametrize("name", ["suffix", "auto"])
def test_a_branch_that_is_right_is_accepted(references: References, name: str) -> None:
    """Several answers to a prompt are known: all are in the tree when one of them is given again."""
    base = references.get("demo").base
    requests = tuple(
        replace(r, request_id=f"{r.request_id}-{seed}", sampling=replace(r.sampling, temperature=1.0, seed=seed))
        for r in references.get("demo").requests[:12]
        for seed in range(6)
    )
    witness = check_method(Reference(base, requests, run_alone(base, requests)), LARGE, name, 15)
    assert witness.num_trees > 0
    assert witness.num_right_branches > 5 or name == "auto"  # which takes the likeliest ones


@pytest.mark.parametrize("name", ["suffix", "auto"])
def test_same_tokens_with_trees_of_a_method_and_grammars(references: References, name: str) -> None:
    """What a grammar forces is the trunk."""
    base = references.get("demo").base
    with open_engine(base, ALONE, PLAIN) as engine:
        requests = tuple(guided_requests(NUM_REQUESTS, engine.model_info.eos_token_ids))
    reference = Reference(base, requests, run_alone(base, requests))
    assert check_method(reference, OTHER_WAYS[1], name, 12).num_trees > 0


def test_same_tokens_with_trees_of_a_method_on_two_ranks(references: References) -> None:
    reference = first(references.get("demo"))
    assert check_method(replace(reference, base=on_ranks(reference.base, 2)), CHUNKS, "suffix", 12).num_trees > 0


def test_same_tokens_with_a_tree_after_drafts_of_a_model(references: References) -> None:
    """Draft layers make the trunk, and the tree follows it; `auto` has their chain as a source."""
    reference = first(references.get("demo"), 24)
    for name, keys in (("mtp", {"mtp_strategy": "with_suffix"}), ("auto", {"auto_with_mtp": True})):
        witness = check_method(reference, LARGE, name, 10, num_model_steps=2, **keys)
        assert witness.num_trees > 0


def model_of(name: str) -> dict[str, str]:
    """Where the demo model's drafter of a method is."""
    return {} if name == "mtp" else {"model": str(demo_drafter(f"demo/{name}"))}


@pytest.mark.parametrize("name", ["mtp", "draft_model", "eagle", "eagle3", "medusa", "hydra", "mlp_speculator"])
def test_same_tokens_with_trees_of_a_model(references: References, name: str) -> None:
    """The second best token of a pass is drafted too, and accepted where it is right."""
    witness = check_method(first(references.get("demo"), 24), LARGE, name, 8, num_model_steps=2, **model_of(name))
    assert witness.num_trees > 50
    assert witness.num_right_branches > 5


def test_trees_of_a_model_have_the_rows_of_a_chain(references: References) -> None:
    """Without a number of passes, there are as many as drafts; the likeliest of all places are verified."""
    witness = check_method(first(references.get("demo"), 24), CHUNKS, "mtp", 3, num_model_steps=3)
    assert witness.num_right_branches > 5


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_same_tokens_with_trees_of_a_model_in_auto(references: References, name: str) -> None:
    """Its second best tokens are in the union, and accepted as its drafts."""
    keys = {METHODS[name].auto_key: True, **model_of(name)} | ({} if name == "mtp" else {"draft_method": name})
    witness = check_method(first(references.get("demo"), 24), LARGE, "auto", 10, num_model_steps=2, **keys)
    assert witness.num_right_branches_of[METHODS[name].source] > 5


def test_same_tokens_with_trees_of_a_model_on_two_ranks(references: References) -> None:
    reference = first(references.get("demo"))
    for name, keys in (("mtp", {}), ("auto", {"auto_with_mtp": True})):
        found = check_method(
            replace(reference, base=on_ranks(reference.base, 2)), CHUNKS, name, 6, num_model_steps=2, **keys
        )
        assert found.num_trees > 0


def test_same_tokens_with_trees_of_a_model_and_grammars(references: References) -> None:
    """What a grammar forbids is cut off, with what follows it."""
    base = references.get("demo").base
    with open_engine(base, ALONE, PLAIN) as engine:
        requests = tuple(guided_requests(NUM_REQUESTS, engine.model_info.eos_token_ids))
    reference = Reference(base, requests, run_alone(base, requests))
    assert check_method(reference, OTHER_WAYS[1], "mtp", 8, num_model_steps=2).num_trees > 0


def test_two_engines_with_trees_of_a_model_give_the_bytes_of_one(references: References) -> None:
    reference = first(references.get("demo"), 12)
    method = Method("mtp trees", SpeculativeConfig("mtp", 7, num_model_steps=2, draft_trees=True))
    with open_pair(reference, (DECODE, method), (PREFILL, method), seed=1) as pair:
        assert compare(reference.answers, pair.run(reference.requests, random.Random(0))) is None
        assert sum(pair.decode.stats().drafts["mtp"].accepted) > 10


def test_same_tokens_with_trees_of_a_model_and_log_probabilities_of_drafts(references: References) -> None:
    reference = first(references.get("demo"))
    speculation = Speculation(num_draft_logprobs=6)
    requests = tuple(replace(r, speculation=speculation) for r in reference.requests)
    keys = {"num_model_steps": 2, "enable_draft_logprob": True}
    assert check_method(replace(reference, requests=requests), CHUNKS, "mtp", 6, **keys).num_trees > 0
