"""Cases of verify_draft_tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import verification as native
from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.ops.reference import verification as reference
from fastdeploy_sd.types import DraftTokens
from tests.ops.cases.case import OpCases
from tests.ops.cases.sampling import offsets, with_parents

NUM_TOKENS = 4


def verifications() -> dict[str, dict[str, Any]]:
    """Random steps under every policy, by equality and by candidates; no request."""
    rng = np.random.default_rng(6)
    found: dict[str, dict[str, Any]] = {
        "empty": {
            "sampled_token_ids": np.zeros(0, np.int32),
            "cu_num_logits": np.zeros(1, np.int32),
            "draft": DraftTokens.none(0),
        }
    }
    for case in range(40):
        chains = step(rng, AcceptPolicy.NORMAL, 0, 0, has_failures=case % 4 == 0)
        found[f"tree-{case}"] = chains | {"draft": with_parents(rng, chains["draft"])}
    for policy in AcceptPolicy:
        for case in range(30):
            found[f"equal-{policy.name}-{case}"] = step(rng, policy, 0, 0, has_failures=case % 3 == 0)
        for max_candidate_len in (1, 2, 3):
            for verify_window in range(4):
                for case in range(20):
                    name = f"candidates-{policy.name}-{max_candidate_len}-{verify_window}-{case}"
                    found[name] = step(rng, policy, max_candidate_len, verify_window, has_failures=case % 4 == 0)
    return found


def step(
    rng: np.random.Generator, policy: AcceptPolicy, max_candidate_len: int, verify_window: int, *, has_failures: bool
) -> dict[str, Any]:
    """Requests with 0 .. 7 drafts or unfinished prompts, over few tokens: right and wrong drafts in every mixture."""
    num_requests = int(rng.integers(1, 9))
    finishes = rng.random(num_requests) < 0.8
    num_draft = rng.integers(0, 8, num_requests) * finishes
    num_logits = (num_draft + 1) * finishes
    num_rows = num_logits.sum()
    sampled = rng.integers(0, NUM_TOKENS, num_rows).astype(np.int32)
    drafts = rng.integers(0, NUM_TOKENS, num_draft.sum()).astype(np.int32)
    drafts[rng.random(len(drafts)) < 0.5] = 0  # often the best candidate, and often what was sampled
    sampled[rng.random(num_rows) < 0.5] = 0
    candidates = None
    if max_candidate_len > 0:
        token_ids = rng.permuted(np.tile(np.arange(NUM_TOKENS), (num_rows, 1)), axis=1)[:, :max_candidate_len]
        zero_first = rng.random(num_rows) < 0.6
        token_ids[zero_first] = np.arange(max_candidate_len)
        lens = rng.integers(0, max_candidate_len + 1, num_rows).astype(np.int32)
        candidates = Candidates(np.ascontiguousarray(token_ids, np.int32), lens, verify_window)
    if has_failures:
        failed = rng.random(num_rows) < 0.2
        sampled[failed] = -1
        if candidates is not None:
            candidates.token_ids[failed], candidates.lens[failed] = -1, 0
    return {
        "sampled_token_ids": sampled,
        "cu_num_logits": offsets(num_logits),
        "draft": DraftTokens(drafts, offsets(num_draft)),
        "policy": policy,
        "candidates": candidates,
    }


VERIFY_DRAFT_TOKENS = OpCases(
    "verify_draft_tokens",
    native.verify_draft_tokens,
    reference.verify_draft_tokens,
    verifications(),
)
