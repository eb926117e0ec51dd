"""Trees of a model's drafts have the most probable tokens of the logits of its chains."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from fastdeploy_sd.ops.sampling import token_logprobs
from fastdeploy_sd.spec_decode.model_based.draft_logits import DraftBranches
from fastdeploy_sd.types import DraftTokens, LogprobArrays, offsets

Node = tuple[tuple[int, ...], float]  # the tokens up to it, and its probability after what it follows


def make_chains(
    rng: random.Random, lengths: list[int], vocab_size: int, num_top: int
) -> tuple[DraftTokens, np.ndarray]:
    """Chains of the argmax of logits that are often equal, and the logits."""
    logits = np.array([[rng.choice((0, 1, 2, 5)) for _ in range(vocab_size)] for _ in range(sum(lengths))], np.float32)
    logits = logits.reshape(-1, vocab_size)
    token_ids = logits.argmax(axis=1).astype(np.int32)
    found = LogprobArrays(*token_logprobs(logits, np.arange(len(logits)), token_ids, num_top))
    return DraftTokens(token_ids, offsets(lengths), logprobs=found), logits


def wanted_tree(logits: np.ndarray, most: int, top_k: int, min_prob: float) -> list[Node]:
    """The same by its meaning: every candidate of a row, sorted."""
    path: tuple[int, ...] = ()
    so_far, nodes = 0.0, []
    for place, row in enumerate(logits.astype(np.float64)):
        logprobs = row - row.max() - math.log(np.exp(row - row.max()).sum())
        order = sorted(range(len(row)), key=lambda t: (-row[t], t))[:top_k]
        nodes += [
            (-so_far - logprobs[t], place, i, (*path, t), math.exp(logprobs[t]))
            for i, t in enumerate(order)
            if i == 0 or math.exp(logprobs[t]) >= min_prob
        ]
        path, so_far = (*path, order[0]), so_far + logprobs[order[0]]
    kept = sorted(nodes, key=lambda node: (round(node[0], 5), *node[1:3]))[:most]
    return [node[3:] for node in sorted(kept, key=lambda node: (node[2] > 0, node[1], node[2]))]


def nodes_of(trees: DraftTokens, prob: np.ndarray, r: int) -> list[Node]:
    tokens, begin = trees.row(r).tolist(), int(trees.cu_num_draft[r])
    return [(tuple(tokens[j] for j in trees.path(r, i)), float(prob[begin + i])) for i in range(len(tokens))]


@pytest.mark.parametrize(("top_k", "min_prob"), [(2, 0.0), (4, 0.0), (9, 0.0), (3, 0.12)])
def test_a_tree_has_the_most_probable_drafts(top_k: int, min_prob: float) -> None:
    """Ties go to the earlier place, then to the lower id; a vocabulary may have fewer tokens."""
    rng = random.Random(top_k)
    num_branches = 0
    for _ in range(60):
        lengths = [rng.randrange(5) for _ in range(rng.randint(1, 4))]
        chains, logits = make_chains(rng, lengths, 7, min(top_k, 7))
        most = np.array([rng.randrange(9) for _ in lengths], np.int32)
        trees, prob = DraftBranches(top_k, min_prob).grow(chains, most, None)
        assert trees.logprobs is None
        for r in range(len(lengths)):
            own = logits[chains.cu_num_draft[r] : chains.cu_num_draft[r + 1]]
            found, wanted = nodes_of(trees, prob, r), wanted_tree(own, most[r], top_k, min_prob)
            assert [path for path, _ in found] == [path for path, _ in wanted]
            np.testing.assert_allclose([p for _, p in found], [p for _, p in wanted], rtol=1e-5)
            num_branches += sum(len(set(path)) > 0 and path != wanted[0][0][: len(path)] for path, _ in found)
    assert num_branches > 100


def test_the_likeliest_chain_comes_first_and_rows_have_at_most_63_drafts() -> None:
    rng = random.Random(0)
    chains, _ = make_chains(rng, [9, 0, 9], 40, 32)
    trees, _ = DraftBranches(32).grow(chains, np.array([200, 5, 20], np.int32), None)
    assert np.diff(trees.cu_num_draft).tolist() == [63, 0, 20]
    for r in (0, 2):
        parents = trees.parents_of(r)
        num_chain = len(trees.chains().row(r))
        assert trees.row(r)[:num_chain].tolist() == chains.row(r)[:num_chain].tolist()
        assert all(parent < num_chain for parent in parents)
    chain, _ = DraftBranches(4).grow(chains, np.array([1, 0, 1], np.int32), None)
    assert chain.parents is None


def test_log_probabilities_are_of_each_draft_where_they_were_asked_for() -> None:
    rng = random.Random(1)
    chains, logits = make_chains(rng, [3, 3], 7, 4)
    trees, _ = DraftBranches(4).grow(chains, np.array([8, 8], np.int32), np.array([2, -1], np.int32))
    found = trees.logprobs
    assert found is not None
    assert found.top_logprobs.shape == (16, 2)
    assert np.isnan(found.logprobs[8:]).all()
    assert not found.ranks[8:].any()
    for i, parent in enumerate(trees.parents_of(0)):
        wanted = token_logprobs(logits, np.array([parent + 1]), trees.row(0)[i : i + 1], 2)
        for part, whole in zip(
            wanted, (found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs), strict=True
        ):
            np.testing.assert_array_equal(part[0], whole[i])


def test_nothing_is_asked_of_logits_for_chains() -> None:
    branches = DraftBranches(1)
    assert branches.wanted(None, 2) is None
    assert branches.wanted(np.array([-1, -1], np.int32), 2) is None
    assert DraftBranches(3).wanted(None, 2).tolist() == [3, 3]  # type: ignore[union-attr]
    assert DraftBranches(3).wanted(np.array([5, -1], np.int32), 2).tolist() == [5, 3]  # type: ignore[union-attr]
