"""Drafts that branch: what each method offers against its definition, and how a row's offers become one tree."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.decision import Decision
from fastdeploy_sd.spec_decode.control.offers import OfferTable
from fastdeploy_sd.spec_decode.methods.ngram import NgramIndex
from fastdeploy_sd.spec_decode.methods.suffix_drafter import SuffixDrafter, SuffixLimits, SuffixRule
from fastdeploy_sd.types import I32, DraftTokens, chain_parents, offsets
from fastdeploy_sd.types.draft_methods import DraftSource
from tests.unit.spec_decode.policy_server import MAX_LEN, SOURCES, by_drafts, i32, linear, rows_of
from tests.unit.spec_decode.suffix_reference import MAX_ANCHORS, Reference, Tokens

MAX_OCCURRENCES, SHORTER = 8, 0.5
Offer = tuple[list[int], list[int], list[float], tuple[int, int, int]]
"""Token ids, parents, probabilities and evidence of a row's offer."""
NOTHING: Offer = ([], [], [], (0, 0, 0))


def nodes_of(drafts: DraftTokens, r: int = 0) -> list[Tokens]:
    """The path of each draft of a row, checked to be those of a tree: no path twice, each after the one it extends."""
    paths: list[Tokens] = []
    for token_id, parent in zip(drafts.row(r).tolist(), drafts.parents_of(r), strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    assert len(set(paths)) == len(paths)
    return paths


def unseen(length: int) -> float:
    return 1.0 / max(length, 1)


# ---- n-grams --------------------------------------------------------------------------------------------------------


def occurrences(text: Sequence[int], sizes: range) -> list[tuple[int, int, float]]:
    """Length, place and weight of the latest occurrences of the text's end, those of its longest end first."""
    found: list[tuple[int, int, float]] = []
    weight = 1.0
    for n in reversed(sizes):
        ends = [e for e in range(len(text) - 1, n - 1, -1) if n <= len(text) and text[e - n : e] == text[-n:]]
        for end in ends:
            if end not in [place for _, place, _ in found] and len(found) < MAX_OCCURRENCES:
                found.append((n, end, weight))
        weight *= SHORTER if ends else 1.0
    return found


def ngram_shares(text: list[int], sizes: range, factor: float, budget: int) -> dict[Tokens, float]:
    """The probability of every path that followed an occurrence."""
    weights: dict[Tokens, float] = {}
    longest: dict[Tokens, int] = {}
    of_children: dict[Tokens, float] = {}
    for n, end, weight in occurrences(text, sizes):
        longest.setdefault((), n)
        path: Tokens = ()
        for i in range(min(budget, math.floor(n * factor + 1e-9))):
            of_children[path] = of_children.get(path, 0.0) + weight
            path = (*path, [*text, *path][end + i])
            weights[path] = weights.get(path, 0.0) + weight
            longest.setdefault(path, n + i + 1)
    shares: dict[Tokens, float] = {(): 1.0}
    for path, weight in weights.items():
        before = path[:-1]
        shares[path] = shares[before] * weight / (of_children[before] + unseen(longest[before]))
    del shares[()]
    return shares


@pytest.mark.parametrize("seed", range(12))
def test_an_ngram_tree_has_the_most_probable_continuations(seed: int) -> None:
    rng = random.Random(seed)
    sizes, factor = range(rng.choice([1, 2]), rng.choice([3, 4])), rng.choice([1.0, 2.0, 8.0])
    index = NgramIndex(1, sizes[0], sizes[-1], factor, follows_copies=False, makes_trees=True)
    index.begin(i32([0]))
    text = [rng.randrange(4) for _ in range(120)]
    table = np.array([text], np.int32)
    num_branches = 0
    for n in range(1, len(text), 3):
        budget = rng.randrange(1, 20)
        drafts = index.propose(rows_of(i32([0]), table, i32([n]), i32([budget])))
        index.check_integrity(table)
        shares = ngram_shares(text[:n], sizes, factor, budget)
        nodes = nodes_of(drafts)
        assert len(nodes) == min(budget, len(shares))
        best = sorted(shares.values(), reverse=True)[:budget]
        assert sum(shares[node] for node in nodes) == pytest.approx(sum(best))
        # The likeliest child comes right after its parent: the first drafts are the chain that branches least.
        for place, node in enumerate(nodes[1:], 1):
            siblings = [shares[other] for other in nodes[:place] if other[:-1] == node[:-1]]
            assert all(share >= shares[node] for share in siblings)
        num_branches += drafts.parents is not None
    assert num_branches > 20


# ---- suffixes -------------------------------------------------------------------------------------------------------


def suffix_shares(own: Reference, rule: SuffixRule, budget: int) -> dict[Tokens, float]:
    """The probability of every path after the matches of table row 0 and their shorter ends, if there is no other."""
    text, match, tail = own.own[0].text, own.own[0].match, tuple(own.own[0].text.sequences[0])
    anchors = [end for end in text.shorter(match) if text.best(end) is not None][:MAX_ANCHORS]
    shares: dict[Tokens, float] = {}

    def follow(string: Tokens, path: Tokens, share: float, matched: int, is_open: bool) -> None:
        if len(path) >= min(budget, math.floor(matched * rule.max_factor + 1e-9)):
            return
        if text.best(string) is None:
            if text.ends(string) != text.ends(tail):
                return
            string = next((end for end in text.shorter(string) if text.best(end) is not None), ())
            is_open = True
            if not string:
                return
        num_continued = max(1, len(text.ends(string)) - is_open)
        for token in sorted(set(tail)):
            count = min(len(text.ends((*string, token))), num_continued)
            found = share * count / (num_continued + unseen(matched + len(path)))
            if count and found >= rule.min_token_prob:
                shares[*path, token] = max(shares.get((*path, token), 0.0), found)
                follow((*string, token), (*path, token), found, matched, False)

    for i, anchor in enumerate(anchors):
        follow(anchor, (), 0.5**i, len(anchor), True)
    return shares


@pytest.mark.parametrize("seed", range(8))
def test_a_suffix_tree_has_the_most_probable_continuations(seed: int) -> None:
    rng = random.Random(seed)
    rule = SuffixRule(rng.choice([3, 64]), rng.choice([1.0, 2.5]), rng.choice([0.02, 0.1]), follows_copies=False)
    drafter = SuffixDrafter(1, 8, rule, SuffixLimits(0, 0), makes_trees=True)
    reference = Reference(rule.max_context, rule.max_factor, rule.min_token_prob, 0, False)
    drafter.begin(0, 0, bytes(16))
    reference.begin(0, 0, 0, ((), 0))
    text = [rng.randrange(3) for _ in range(45)]
    table = np.array([text], np.int32)
    num_branches = 0
    for n in range(5, len(text), 4):
        reference.read(0, text[reference.own[0].text.num_tokens : n])
        budget = rng.randrange(1, 12)
        drafts = drafter.propose(rows_of(i32([0]), table, i32([n]), i32([budget])))
        shares = suffix_shares(reference, rule, budget)
        nodes = nodes_of(drafts)
        assert len(nodes) == min(budget, len(shares))
        best = sorted(shares.values(), reverse=True)[:budget]
        assert sum(shares[node] for node in nodes) == pytest.approx(sum(best))
        num_branches += drafts.parents is not None
    assert num_branches > 2


def test_a_prefix_leaves_room_for_the_bits_of_a_mask() -> None:
    """With its newest token a request has at most 64 rows where drafts branch."""
    index = NgramIndex(1, 1, 3, 64.0, follows_copies=False, makes_trees=True)
    index.begin(i32([0]))
    rng = random.Random(1)
    table = np.array([[rng.randrange(3) for _ in range(200)]], np.int32)
    prefix = DraftTokens(i32([1] * 10), i32([0, 10]))
    for given, most in ((None, 63), (prefix, 53)):
        drafts = index.propose(rows_of(i32([0]), table, i32([200]), i32([100]), given))
        assert len(nodes_of(drafts)) == most


def test_an_index_of_chains_makes_no_trees() -> None:
    index = NgramIndex(1, 1, 3, 2.0, follows_copies=False)
    index.makes_trees = True
    index.begin(i32([0]))
    with pytest.raises(ValueError, match="draft_parents: expected none of an index without earlier occurrences"):
        index.propose(rows_of(i32([0]), np.ones((1, 8), np.int32), i32([8]), i32([4])))


# ---- the union ------------------------------------------------------------------------------------------------------


class TreePolicy:
    """Texts that are known, and offers of trees for them."""

    def __init__(self, texts: Sequence[Sequence[int]], num_sources: int, max_draft_len: int = 24) -> None:
        self.texts, self.num_sources = texts, num_sources
        self.controller = DraftController(len(texts), max_draft_len, SOURCES[:num_sources], makes_trees=True)
        self.offers = OfferTable(num_sources, len(texts), max_draft_len, has_trees=True)
        self.controller.begin(i32(range(len(texts))))

    def decide(
        self,
        num_tokens: Sequence[int],
        offers: Sequence[Sequence[Offer]],
        cost: float,
        max_len: int = 64,
        prefix: DraftTokens | None = None,
    ) -> Decision:
        """`offers[r][s]`: of row r by source s."""
        for s in range(self.num_sources):
            rows, plane = [of_row[s] for of_row in offers], self.offers.offer(s, len(offers))
            assert plane.parents is not None
            plane.cu_num_draft[:] = offsets([len(row[0]) for row in rows])
            for r, (token_ids, parents, probs, evidence) in enumerate(rows):
                part = slice(*plane.cu_num_draft[r : r + 2].tolist())
                plane.token_ids[part], plane.parents[part], plane.draft_prob[part] = token_ids, parents, probs
                plane.evidence[r] = evidence
        table, rows_ = np.zeros((len(self.texts), MAX_LEN), np.int32), i32(range(len(self.texts)))
        for r, n in enumerate(num_tokens):
            table[r, :n] = self.texts[r][:n]
        x = rows_of(rows_, table, i32(num_tokens), i32([max_len] * len(rows_)), prefix)
        return self.controller.decide(x, self.offers, by_drafts(linear(cost, 200)), len(rows_), 1.0)


def random_offer(rng: random.Random, ahead: Sequence[int], max_depth: int = 12) -> Offer:
    """A tree of at most 12 drafts in the order of DraftTree, a part of them right."""
    paths: list[Tokens] = []

    def grow(before: Tokens) -> None:
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            right = ahead[len(before)] if len(before) < len(ahead) else 0
            path = (*before, right if rng.random() < 0.7 else rng.randrange(6))
            if path not in paths and len(paths) < 12 and len(path) <= max_depth:
                paths.append(path)
                grow(path)

    grow(())
    parents = [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
    return [path[-1] for path in paths], parents, [rng.random() for _ in paths], (rng.randrange(9), 2, 0)


def paths_of(offer: Offer) -> list[Tokens]:
    paths: list[Tokens] = []
    for token_id, parent in zip(offer[0], offer[1], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


@pytest.mark.parametrize("seed", range(6))
def test_a_union_has_each_offered_path_once(seed: int) -> None:
    """Shared beginnings are one node, of a source that offered it; never more nodes than a request may have."""
    rng = random.Random(seed)
    texts = [[rng.randrange(6) for _ in range(MAX_LEN)] for _ in range(3)]
    policy = TreePolicy(texts, 3)
    num_tokens = [1, 2, 3]
    num_drafts = num_shared = 0
    for _ in range(60):
        offers = [[random_offer(rng, text[n:]) for _ in range(3)] for text, n in zip(texts, num_tokens, strict=True)]
        cost, max_len = rng.choice([0.0, 0.02, 0.1]), rng.choice([2, 9, 64])
        decision = policy.decide(num_tokens, offers, cost, max_len)
        sources = decision.drafts.sources
        for r, of_row in enumerate(offers):
            nodes, begin = nodes_of(decision.drafts, r), int(decision.drafts.cu_num_draft[r])
            offered = [paths_of(offer) for offer in of_row]
            assert len(nodes) <= max_len
            for i, node in enumerate(nodes):
                assert sources is not None
                assert node in offered[SOURCES.index(DraftSource(int(sources[begin + i])))]
                num_shared += sum(node in paths for paths in offered) > 1
            num_drafts += len(nodes)
            if cost == 0.0 and max_len == 64 and decision.drafts.cu_num_draft[-1] > 0:
                # Free drafts are all taken whose path is not hopeless: first of all those that follow the row's text.
                assert {path for paths in offered for path in paths if len(path) == 1} <= set(nodes)
        num_tokens = [n + rng.randrange(1, 4) for n in num_tokens]
    assert num_drafts > 500
    assert num_shared > 50


def test_of_more_offers_than_are_looked_at_the_best_one_is_the_tree() -> None:
    rng = random.Random(2)
    text = [rng.randrange(6) for _ in range(MAX_LEN)]
    policy = TreePolicy([text] * 100, 3)
    num_branches = num_drafts = 0
    for n in range(1, 40, 4):
        offers = [[random_offer(rng, text[n:]) for _ in range(3)] for _ in policy.texts]
        decision = policy.decide([n] * 100, offers, 0.0)
        for r, of_row in enumerate(offers):
            nodes = nodes_of(decision.drafts, r)
            assert any(set(nodes) <= set(paths_of(offer)) for offer in of_row)
            num_drafts += len(nodes)
        num_branches += int((~decision.drafts.is_chain).sum())
    assert num_drafts > 500
    assert num_branches > 20


@pytest.mark.parametrize("cost", [0.001, 0.03, 0.2])
def test_a_chain_is_a_tree(cost: float) -> None:
    """Chains of one source get the same decisions, and teach the same."""
    rng = random.Random(3)
    phrase = [rng.randrange(50) for _ in range(20)]
    text = [t if rng.random() < 0.9 else rng.randrange(50) for t in phrase * (MAX_LEN // 20)]
    policies = [
        (DraftController(1, 16, SOURCES[:1], makes_trees=is_tree), OfferTable(1, 1, 16, has_trees=is_tree))
        for is_tree in (False, True)
    ]
    num_drafts, n = 0, 30
    for controller, _ in policies:
        controller.begin(i32([0]))
    while n < MAX_LEN - 40:
        found = []
        for controller, offers in policies:
            plane = offers.offer(0, 1)
            plane.cu_num_draft[:] = [0, 16]
            plane.token_ids[:16], plane.draft_prob[:16] = text[n - 20 : n - 4], 0.5
            plane.evidence[:] = (n % 12, n % 12, 0)
            if plane.parents is not None:
                plane.parents[:16] = chain_parents(plane.cu_num_draft)
            x = rows_of(i32([0]), np.array([text], np.int32), i32([n]), i32([16]))
            found.append(controller.decide(x, offers, by_drafts(linear(cost, 64)), 1, 1.0))
        chain, tree = found
        assert tree.drafts.parents is None
        assert chain.drafts.token_ids.tolist() == tree.drafts.token_ids.tolist()
        assert (chain.num_tokens, chain.time) == (tree.num_tokens, tree.time)
        num_drafts += len(chain.drafts.token_ids)
        n += rng.randrange(1, 5)
    assert num_drafts > 50
    assert policies[0][0].stats() == policies[1][0].stats()


def test_an_offer_is_scored_along_the_path_that_the_text_took() -> None:
    """Every draft after a right one is right or wrong; what follows a wrong one is never known."""
    rng = random.Random(9)
    text = [rng.randrange(6) for _ in range(MAX_LEN)]
    policy = TreePolicy([text], 2)
    num_scored, num_right = [0, 0], [0, 0]
    for n in range(1, MAX_LEN - 60, 13):  # each offer is scored to its end before the next one
        offers = [random_offer(rng, text[n:], max_depth=3) for _ in range(2)]  # so no path is hopeless
        policy.decide([n], [offers], 0.01)
        policy.decide([n + 12], [[NOTHING, NOTHING]], 0.01)
        for s, offer in enumerate(offers):
            known = [path for path in paths_of(offer) if list(path[:-1]) == text[n : n + len(path) - 1]]
            num_scored[s] += len(known)
            num_right[s] += sum(list(path) == text[n : n + len(path)] for path in known)
    stats = [policy.controller.stats()[source] for source in SOURCES[:2]]
    assert ([s.num_scored for s in stats], [s.observed for s in stats]) == (num_scored, num_right)
    assert all(0 < s.wanted_accepted <= s.num_wanted for s in stats)
    assert all(s.observed > 20 for s in stats)


def test_agreement_makes_a_draft_more_probable() -> None:
    """Two sources agree on 1 and differ after it: the shared draft comes first, and both branches follow."""
    policy = TreePolicy([[0] * MAX_LEN], 2)
    offers: list[Offer] = [([1, 2], [-1, 0], [0.5, 0.5], (3, 3, 0)), ([1, 3], [-1, 0], [0.5, 0.5], (3, 3, 0))]
    decision = policy.decide([5], [offers], 0.001)
    assert nodes_of(decision.drafts)[0] == (1,)
    assert set(nodes_of(decision.drafts)) == {(1,), (1, 2), (1, 3)}
    alone = TreePolicy([[0] * MAX_LEN], 2).decide([5], [[([1], [-1], [0.5], (3, 3, 0)), NOTHING]], 0.001)
    assert policy.decide([5], [[offers[0], offers[1]]], 0.001).num_tokens > alone.num_tokens


def test_certain_drafts_are_the_trunk() -> None:
    policy = TreePolicy([[0] * MAX_LEN], 2)
    prefix = DraftTokens(i32([7, 8]), i32([0, 2]), np.array([DraftSource.GRAMMAR] * 2, np.int8))
    offers: list[Offer] = [([1, 2], [-1, -1], [0.9, 0.5], (9, 9, 0)), ([3], [-1], [0.9], (9, 9, 0))]
    drafts = policy.decide([5], [offers], 0.001, prefix=prefix).drafts
    assert nodes_of(drafts)[:2] == [(7,), (7, 8)]
    assert set(nodes_of(drafts)[2:]) == {(7, 8, 1), (7, 8, 2), (7, 8, 3)}
    assert drafts.sources is not None
    assert drafts.sources[:2].tolist() == [DraftSource.GRAMMAR] * 2
    only = policy.decide([5], [[NOTHING, NOTHING]], 0.001, prefix=prefix).drafts
    assert (only.token_ids.tolist(), only.parents) == ([7, 8], None)


def parents_refused() -> list[tuple[list[int], str]]:
    text = "offers: expected drafts that follow -1 or an earlier one of the row"
    return [([0, -1], text), ([-1, 1], text), ([-2, 0], text)]


@pytest.mark.parametrize(("parents", "text"), parents_refused())
def test_parents_that_are_none_are_refused(parents: list[int], text: str) -> None:
    policy = TreePolicy([[0] * MAX_LEN], 1)
    with pytest.raises(ValueError, match=text):
        policy.decide([5], [[([1, 2], parents, [0.5, 0.5], (1, 1, 0))]], 0.1)


def test_offers_must_have_parents_where_trees_are_made() -> None:
    controller, x = (
        DraftController(1, 4, SOURCES[:1], makes_trees=True),
        rows_of(i32([0]), table_of(), i32([4]), i32([4])),
    )
    controller.begin(i32([0]))
    with pytest.raises(ValueError, match="parents: expected some where trees are made"):
        controller.decide(x, OfferTable(1, 1, 4), by_drafts([1.0]), 1)


def table_of() -> I32:
    return np.zeros((1, 8), np.int32)
