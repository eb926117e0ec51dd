"""Cases of process_logits, sample, top_p_candidates and token_logprobs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.reference import sampling as reference
from fastdeploy_sd.types import DraftTokens
from tests.ops.cases.case import OpCases
from tests.ops.cases.sampling_rows import (
    INF,
    broken_rows,
    equal_rows,
    far_apart_rows,
    logits_of,
    nearly_certain_rows,
    wide_rows,
)
from tests.ops.sampling_arrays import build_sampling_arrays


def offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def draws() -> dict[str, dict[str, Any]]:
    """Filters on rows of every kind, rules on most of them; vocabularies around borders of lanes, groups, chunks."""
    rng = np.random.default_rng(13)
    found = {}
    for vocab in (1, 2, 17, 128, 500, 8192, 20001):
        for kind in ("steep", "flat", "ties", "forbidden"):
            num_requests = 24
            rows = num_requests + 6
            parts = {"steep": "allowed", "ties": "none"}.get(kind, "all")
            sampling = build_sampling_arrays(
                num_requests,
                rows,
                temperature=rng.choice([0.0, 1e-9, 0.3, 1.0, 3.0, 1e4], num_requests),
                top_k=rng.choice([0, 0, 1, 3, 50, 1000, 10**6], num_requests),
                top_p=rng.choice([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999999], num_requests),
                min_p=rng.choice([0.0, 0.0, 1e-4, 0.1, 1.0], num_requests),
                seed=rng.integers(0, 2**63, num_requests),
                vocab=vocab,
                **rules(np.random.default_rng(vocab), parts, rows, num_requests, vocab),
            )
            found[f"{kind}-{vocab}"] = {
                "logits": logits_of(rng, kind, rows, vocab),
                "batch_id_per_output": rng.permutation(np.arange(rows) % num_requests).astype(np.int32),
                "positions": rng.integers(0, 2**31, rows).astype(np.int32),
                "sampling": sampling,
            }
    found["broken-rows"] = broken_rows(rng)
    found |= {f"wide-{kind}": wide_rows(rng, kind) for kind in ("steep", "flat", "ties")}
    found["far-apart"] = far_apart_rows(rng)
    found |= {f"exactly-top-p-{vocab}": equal_rows(rng, vocab) for vocab in (6, 14, 28, 1000)}
    found["no-row"] = {
        "logits": np.zeros((0, 40), np.float32),
        "batch_id_per_output": np.zeros(0, np.int32),
        "positions": np.zeros(0, np.int32),
        "sampling": build_sampling_arrays(2, 0, vocab=40),
    }
    return found


def listings() -> dict[str, dict[str, Any]]:
    """The same rows with few and many candidates, more than tokens among them; sums that just reach top_p."""
    lengths = itertools.cycle([5, 1, 2, 40, 30000])
    found = {name: case | {"max_candidate_len": next(lengths)} for name, case in draws().items()}
    found["nearly-certain"] = nearly_certain_rows(np.random.default_rng(6)) | {"max_candidate_len": 8}
    for top_p in (0.1, 0.3, 0.7, 0.9, 1.0):
        found[f"ten-equal-{top_p}"] = {
            "logits": np.zeros((6, 10), np.float32),
            "batch_id_per_output": np.zeros(6, np.int32),
            "positions": np.arange(6, dtype=np.int32),
            "sampling": build_sampling_arrays(1, 6, vocab=10, top_p=top_p, seed=3),
            "max_candidate_len": 8,
        }
    return found


def drafted_steps() -> dict[str, dict[str, Any]]:
    """Requests with right and wrong drafts, with none, with an unfinished prompt, and with a row that is broken."""
    rng = np.random.default_rng(7)
    found = {}
    for vocab in (40, 20001):
        num_draft = np.array([0, 5, 3, 0, 5, 4, 5, 1, 2, 5])
        num_logits = (num_draft + 1) * (np.arange(len(num_draft)) != 3)
        rows, num_requests = num_logits.sum(), len(num_draft)
        case = {
            "logits": logits_of(rng, "steep", rows, vocab),
            "batch_id_per_output": np.repeat(np.arange(num_requests), num_logits).astype(np.int32),
            "positions": rng.integers(0, 2**31, rows).astype(np.int32),
            "sampling": build_sampling_arrays(
                num_requests,
                rows,
                temperature=rng.choice([0.0, 1.0], num_requests),
                top_k=rng.choice([0, 3], num_requests),
                seed=rng.integers(0, 2**63, num_requests),
                vocab=vocab,
            ),
        }
        for row in (2, 9, 20):
            case["logits"][row, 7] = np.nan
        drafts = right_drafts(reference.sample(**case), num_logits, num_draft)
        for name, share in (("right", 0.0), ("mixed", 0.3), ("wrong", 1.0)):
            guesses = np.where(rng.random(len(drafts)) < share, drafts + 1, drafts).astype(np.int32)
            drafted = DraftedRows(offsets(num_logits), DraftTokens(guesses, offsets(num_draft)))
            found[f"drafts-{name}-{vocab}"] = case | {"drafted": drafted}
            if vocab == 40:
                tree = drafted._replace(draft=with_parents(rng, drafted.draft))
                found[f"trees-{name}-{vocab}"] = case | {"drafted": tree}
    return found


def with_parents(rng: np.random.Generator, draft: DraftTokens) -> DraftTokens:
    """The same drafts, each after a random one before it or after none."""
    parents = [int(rng.integers(-1, i)) for count in np.diff(draft.cu_num_draft) for i in range(count)]
    return replace(draft, parents=np.array(parents, np.int32))


def right_drafts(token_ids: np.ndarray, num_logits: np.ndarray, num_draft: np.ndarray) -> np.ndarray:
    """The tokens of the rows, without each request's last one; where a row is broken, any."""
    rows = np.split(token_ids, np.cumsum(num_logits)[:-1])
    drafts = [row[:n] for row, n in zip(rows, num_draft, strict=True)]
    return np.maximum(np.concatenate(drafts), 0)


def processed() -> dict[str, dict[str, Any]]:
    """Each penalty alone and all together, with drafts that repeat; bias and mask on penalised tokens; no request.

    All rows, some of them in no order, and none.
    """
    rng = np.random.default_rng(4)
    found = {}
    for vocab in (1, 37, 20001):
        for parts in ("none", "repetition", "presence", "frequency", "bias", "mask", "allowed", "all"):
            step = processed_step(rng, parts, vocab)
            rows = np.arange(len(step["logits"]), dtype=np.int32)
            found[f"{parts}-{vocab}"] = step | {"rows": rows}
            found[f"{parts}-{vocab}-some"] = step | {"rows": rng.permutation(rows)[: len(rows) // 2]}
            found[f"{parts}-{vocab}-tree"] = step | {"rows": rows, "draft": with_parents(rng, step["draft"])}
    found["none"] = step | {"rows": rows[:0]}
    found["empty"] = {
        "logits": np.zeros((0, 5), np.float32),
        "rows": np.zeros(0, np.int32),
        "cu_num_logits": np.zeros(1, np.int32),
        "draft": DraftTokens.none(0),
        "sampling": build_sampling_arrays(0, 0, vocab=5),
    }
    return found


def processed_step(rng: np.random.Generator, parts: str, vocab: int) -> dict[str, Any]:
    num_draft = np.array([0, 3, 0, 5, 1, 0])
    num_logits = np.array([1, 4, 0, 6, 2, 1])
    num_requests, rows = len(num_draft), num_logits.sum()
    columns = rules(rng, parts, rows, num_requests, vocab)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    logits[0, 0] = -INF
    return {
        "logits": logits,
        "cu_num_logits": offsets(num_logits),
        "draft": DraftTokens(rng.integers(0, min(vocab, 4), num_draft.sum()).astype(np.int32), offsets(num_draft)),
        "sampling": build_sampling_arrays(num_requests, rows, vocab=vocab, **columns),
    }


def rules(rng: np.random.Generator, parts: str, rows: int, num_requests: int, vocab: int) -> dict[str, Any]:
    """Columns of one kind of rule, or of all."""
    few = min(vocab, 4)
    counts = rng.integers(0, 3, (4, vocab)) * (rng.random((4, vocab)) < 0.05)
    counts[0, :few] = rng.integers(0, 2, few) * 7
    counts |= (rng.random((4, vocab)) < 0.05).astype(np.int64) << 30
    columns: dict[str, Any] = {}
    for name, values in [
        ("repetition", [0.5, 1.0, 1.3]),
        ("presence", [-1.0, 0.0, 2.0]),
        ("frequency", [-0.3, 0.0, 0.7]),
    ]:
        if parts in (name, "all"):
            columns[f"{name}_penalty"] = rng.choice(values, num_requests)
    if parts not in ("none", "bias", "mask", "allowed"):
        columns |= {"count_rows": np.resize([2, 0, -1, 3, -1, 1], num_requests), "token_counts": counts}
    if parts in ("bias", "all"):
        num_bias = rng.integers(0, min(vocab, 5) + 1, num_requests)
        columns["biases"] = [
            dict(zip(rng.permutation(vocab)[:n].tolist(), rng.normal(0, 30, n).clip(-100, 100), strict=True))
            for n in num_bias
        ]
    if parts in ("mask", "all"):
        num_mask = rng.integers(0, 4, rows)
        columns |= {"cu_mask": offsets(num_mask), "mask_token_ids": rng.integers(0, vocab, num_mask.sum())}
    if parts in ("allowed", "all"):
        columns |= allowed(rng, rows, vocab)
    return columns


def allowed(rng: np.random.Generator, rows: int, vocab: int) -> dict[str, Any]:
    """Rows that allow all, most, few, one and no token; several share bits, which are set behind the vocabulary."""
    shares = (1.0, 0.9, 0.5, 1 / 31, 1 / 33, 1e-3, 0.0)
    bits = np.concatenate([rng.random((1, vocab)) < share for share in shares])
    bits[-2] = np.arange(vocab) == rng.integers(vocab)
    num_words = -(-vocab // 32) + 1
    padded = np.ones((len(bits), num_words * 32), np.uint8)
    padded[:, :vocab] = bits
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return {"allowed_rows": np.resize([-1, *range(len(bits)), 2, 2], rows), "allowed_bits": words}


def logprobs() -> dict[str, dict[str, Any]]:
    """No, some and all alternatives; ties; forbidden tokens; rows without a distribution."""
    rng = np.random.default_rng(5)
    found = {}
    for vocab, num_top in [(1, 0), (1, 1), (40, 40), (500, 5), (20001, 0), (20001, 20)]:
        for kind in ("steep", "flat", "ties", "forbidden"):
            logits = logits_of(rng, kind, 6, vocab)
            found[f"{kind}-{vocab}-{num_top}"] = {
                "logits": logits,
                "rows": rng.integers(0, 6, 7),
                "token_ids": rng.integers(0, vocab, 7).astype(np.int32),
                "num_top": num_top,
            }
    broken = broken_rows(rng)["logits"]
    none, whole = np.zeros(0, np.int32), np.arange(len(broken))
    found["broken-rows"] = {
        "logits": broken,
        "rows": whole,
        "token_ids": np.full_like(whole, 8999, np.int32),
        "num_top": 3,
    }
    found["no-row"] = {"logits": np.zeros((0, 9), np.float32), "rows": none, "token_ids": none, "num_top": 2}
    return found


# The same float operations in the same order: no tolerance.
PROCESS_LOGITS = OpCases(
    "process_logits",
    native.process_logits,
    reference.process_logits,
    processed(),
    rtol=0.0,
    atol=0.0,
)
SAMPLE = OpCases("sample", native.sample, reference.sample, draws() | drafted_steps())
TOP_P_CANDIDATES = OpCases("top_p_candidates", native.top_p_candidates, reference.top_p_candidates, listings())
# Weights have a relative error below 2e-7, their logarithm thus an absolute one; the result is rounded once.
TOKEN_LOGPROBS = OpCases(
    "token_logprobs",
    native.token_logprobs,
    reference.token_logprobs,
    logprobs(),
    rtol=1.2e-7,
    atol=3e-7,
)
