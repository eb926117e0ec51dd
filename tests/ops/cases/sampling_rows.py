"""Rows of logits, and steps of them that are hard to sample from."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.sampling_arrays import build_sampling_arrays

INF = np.inf


def logits_of(rng: np.random.Generator, kind: str, rows: int, vocab: int) -> np.ndarray:
    """Rows like a model's (steep), near uniform, with ties (few distinct values), and with most tokens forbidden."""
    x = rng.standard_normal((rows, vocab))
    if kind == "steep":
        x = 4.0 * x - 0.5 * np.log1p(np.arange(vocab))
    elif kind == "ties":
        x = np.round(x)
    elif kind == "forbidden":
        x[rng.random((rows, vocab)) < 0.9] = -INF
        x[np.arange(rows), rng.integers(0, vocab, rows)] = 1.0
    return x.astype(np.float32)


def broken_rows(rng: np.random.Generator) -> dict[str, Any]:
    """NaN and +inf at the first, an inner and the last token; all -inf; only -inf and one token; huge finite values."""
    vocab = 9000
    rows = [rng.standard_normal(vocab) for _ in range(9)]
    for row, (place, value) in zip(rows, [(p, v) for p in (0, 4500, vocab - 1) for v in (np.nan, INF)], strict=False):
        row[place] = value
    rows[6][:] = -INF
    rows[7][:] = -INF
    rows[7][8999] = -3e38
    rows[8][:3] = (3e38, -3e38, 3e38)
    num_rows = 2 * len(rows)
    sampling = build_sampling_arrays(2, num_rows, vocab=vocab, temperature=[0.0, 1.0], top_p=[1.0, 0.5])
    return {
        "logits": np.repeat(rows, 2, axis=0).astype(np.float32),
        "batch_id_per_output": (np.arange(num_rows) % 2).astype(np.int32),
        "positions": np.arange(num_rows, dtype=np.int32),
        "sampling": sampling,
    }


def wide_rows(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """A vocabulary of many chunks, filters that keep few and many of its tokens."""
    top_k, top_p = np.array([0, 0, 50, 20000, 100000, 151936]), np.array([1.0, 0.9, 1.0, 0.95, 1.0, 0.999999])
    num_rows = len(top_k)
    return {
        "logits": logits_of(rng, kind, num_rows, 151937),
        "batch_id_per_output": np.arange(num_rows, dtype=np.int32),
        "positions": rng.integers(0, 2**31, num_rows).astype(np.int32),
        "sampling": build_sampling_arrays(num_rows, num_rows, vocab=151937, top_k=top_k, top_p=top_p, seed=5),
    }


def far_apart_rows(rng: np.random.Generator) -> dict[str, Any]:
    """Logits as far apart as floats can be, and nearer to each other than a division can tell."""
    values = [[3e38, -3e38], [1e38, 2e38, -1e38], [0.0, 1e-45, -1e-45], [0.0, -0.0, -1.0]]
    logits = np.stack([rng.choice(np.array(row, np.float32), 5000) for row in values for _ in range(3)])
    sampling = build_sampling_arrays(3, len(logits), vocab=5000, top_k=[3000, 100, 0], top_p=[1.0, 0.5, 0.75])
    return {
        "logits": logits,
        "batch_id_per_output": (np.arange(len(logits)) % 3).astype(np.int32),
        "positions": np.arange(len(logits), dtype=np.int32),
        "sampling": sampling,
    }


def equal_rows(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Tokens that are all as likely, some of which make up top_p exactly."""
    num_rows = 40
    return {
        "logits": np.full((num_rows, vocab), -2.5, np.float32),
        "batch_id_per_output": np.arange(num_rows, dtype=np.int32),
        "positions": rng.integers(0, 2**31, num_rows).astype(np.int32),
        "sampling": build_sampling_arrays(
            num_rows,
            num_rows,
            vocab=vocab,
            temperature=0.7,
            top_p=np.resize([0.125, 0.25, 0.5, 0.75], num_rows),
            seed=5,
        ),
    }


def nearly_certain_rows(rng: np.random.Generator) -> dict[str, Any]:
    """One token with all but some 1e-8 of the probability: what is left is lost, or not, in sums of floats."""
    num_rows, vocab = 400, 40
    logits = rng.standard_normal((num_rows, vocab)).astype(np.float32)
    logits[np.arange(num_rows), rng.integers(0, vocab, num_rows)] = rng.uniform(18, 24, num_rows)
    return {
        "logits": logits,
        "batch_id_per_output": np.zeros(num_rows, np.int32),
        "positions": np.arange(num_rows, dtype=np.int32),
        "sampling": build_sampling_arrays(1, num_rows, vocab=vocab, seed=9),
    }
