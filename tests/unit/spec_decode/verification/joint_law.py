"""Three tokens of a tiny language model: their exact joint law, many seeded decodings of them, and how the two compare.

The exact law is enumerated from the definitions of the sampling parameters and shares no code with the product.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.types import EMPTY_I32, DraftTokens, SamplingArrays
from tests.unit.spec_decode.verification.one_step import verify_once

VOCAB = 6
NUM_TOKENS = 3
PROMPT = 4  # the one token of the prompt
IN_PROMPT = 1 << 30
# The logits after each context: (), then (a,), then (a, b). Every context has a favourite, and none is hopeless.
NUM_CONTEXTS = 1 + VOCAB + VOCAB**2
LOGITS = np.round(np.random.default_rng(2024).normal(0.0, 1.1, (NUM_CONTEXTS, VOCAB)), 2).astype(np.float32)


@dataclass(frozen=True)
class Params:
    """Sampling parameters of every decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def context_of(tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
    """i[N], the row of LOGITS after the first `length` (0 .. 2) of each row of tokens i[N, 3]."""
    after_one, after_two = 1 + tokens[:, 0], 1 + VOCAB + VOCAB * tokens[:, 0] + tokens[:, 1]
    return np.choose(length, [np.zeros_like(after_one), after_one, after_two])


def next_probabilities(history: tuple[int, ...], params: Params) -> list[float]:
    """p(next token | history) by the definitions of the parameters."""
    index = int(context_of(np.array([[*history, 0, 0]]), np.array([len(history)]))[0])
    logits = [_penalised(float(LOGITS[index, t]), t, history, params) / params.temperature for t in range(VOCAB)]
    weights = [math.exp(logit) for logit in logits]
    reached, nucleus = 0.0, set()
    for token in sorted(range(VOCAB), key=lambda t: (-weights[t], t)):
        if reached >= params.top_p:
            break
        nucleus.add(token)
        reached += weights[token] / sum(weights)
    kept = sum(weights[token] for token in nucleus)
    return [weights[token] / kept if token in nucleus else 0.0 for token in range(VOCAB)]


def _penalised(logit: float, token: int, history: tuple[int, ...], params: Params) -> float:
    count = history.count(token)
    if count or token == PROMPT:
        logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    return logit - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def exact_law(params: Params) -> np.ndarray:
    """f64[6, 6, 6], the probability of every three tokens."""
    law = np.zeros((VOCAB,) * NUM_TOKENS)
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        steps = (next_probabilities(tokens[:i], params)[tokens[i]] for i in range(NUM_TOKENS))
        law[tokens] = math.prod(steps)
    return law


def decode(params: Params, rule: VerifyRule, drafter: np.ndarray | None, num_draws: int) -> np.ndarray:
    """i32[num_draws, 3] tokens with seeds 0 .. num_draws - 1, all requests in one batch through the real ops.

    Args:
        drafter: i[NUM_CONTEXTS], the token that it guesses after each context; None = no drafts. It drafts for all
            positions but the last.
    """
    tokens, lengths = np.zeros((num_draws, NUM_TOKENS), np.int32), np.zeros(num_draws, np.int64)
    while True:
        active = np.flatnonzero(lengths < NUM_TOKENS)
        if len(active) == 0:
            return tokens
        known, length = tokens[active], lengths[active]
        num_draft = np.zeros_like(length)
        if drafter is not None:
            num_draft = NUM_TOKENS - 1 - length
            for j in range(int(num_draft.max())):
                rows = np.flatnonzero(j < num_draft)
                known[rows, length[rows] + j] = drafter[context_of(known[rows], length[rows] + j)]
        outputs, counts = _step(known, length, num_draft, params, rule, active)
        rows = np.repeat(active, counts)
        tokens[rows, np.repeat(length, counts) + _within(counts)] = outputs
        lengths[active] += counts


def _within(counts: np.ndarray) -> np.ndarray:
    """0 .. counts[r] - 1 for every r, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _step(
    known: np.ndarray, length: np.ndarray, num_draft: np.ndarray, params: Params, rule: VerifyRule, seeds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Verify one step; `known` holds the `length` committed tokens and then the drafts. Returns outputs and counts."""
    num_logits = num_draft + 1
    request, j = np.repeat(np.arange(len(known)), num_logits), _within(num_logits)
    contexts = context_of(known[request], length[request] + j)
    is_draft = j < num_draft[request]
    draft_ids = known[request[is_draft], (length[request] + j)[is_draft]]
    offsets = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (num_logits, num_draft)]
    result, failed = verify_once(
        rule,
        LOGITS[contexts],
        offsets[0],
        (length[request] + j + 1).astype(np.int32),  # the prompt is position 0
        DraftTokens(draft_ids.astype(np.int32), offsets[1]),
        _sampling(known, length, len(request), params, seeds),
    )
    assert failed == ()
    return result.token_ids, np.diff(result.cu_num_output)


def _sampling(
    known: np.ndarray, length: np.ndarray, num_rows: int, params: Params, seeds: np.ndarray
) -> SamplingArrays:
    n = len(known)
    token_counts = np.zeros((n if params.has_penalty else 0, VOCAB), np.int32)
    if params.has_penalty:
        token_counts[:, PROMPT] = IN_PROMPT
        for i in range(NUM_TOKENS):
            rows = np.flatnonzero(i < length)
            token_counts[rows, known[rows, i]] += 1

    def column(value: float) -> np.ndarray:
        return np.full(n, value, np.float32)

    return SamplingArrays(
        table_rows=np.arange(n, dtype=np.int32),
        temperature=column(params.temperature),
        top_k=np.zeros(n, np.int32),
        top_p=column(params.top_p),
        min_p=column(0.0),
        repetition_penalty=column(params.repetition_penalty),
        presence_penalty=column(params.presence_penalty),
        frequency_penalty=column(params.frequency_penalty),
        seed=seeds.astype(np.uint64),
        num_logprobs=np.full(n, -1, np.int32),
        count_rows=np.arange(n, dtype=np.int32) if params.has_penalty else np.full(n, -1, np.int32),
        token_counts=token_counts,
        num_bias=np.zeros(n, np.int32),
        bias_token_ids=np.zeros((n, 0), np.int32),
        bias_values=np.zeros((n, 0), np.float32),
        cu_mask=np.zeros(num_rows + 1, np.int32),
        mask_token_ids=EMPTY_I32,
        allowed_rows=np.full(num_rows, -1, np.int32),
        allowed_bits=np.zeros((0, 0), np.int32),
    )


def chi_square(tokens: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic of the counts of i[N, 3] tokens and its degrees of freedom.

    The rarest outcomes are taken together until 5 of them are expected. An impossible one gives infinity.
    """
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(tokens.T), 1)
    if (counts[law == 0.0] > 0).any():
        return math.inf, 1
    order = np.argsort(law, axis=None)
    expected, observed = len(tokens) * law.ravel()[order], counts.ravel()[order]
    num_rare = int(np.searchsorted(np.cumsum(expected), 5.0)) + 1
    expected = np.array([expected[:num_rare].sum(), *expected[num_rare:]])
    observed = np.array([observed[:num_rare].sum(), *observed[num_rare:]])
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def critical_value(num_degrees: int) -> float:
    """What a chi-square statistic exceeds with probability 1e-3.

    Wilson and Hilferty (1931): the cube root of chi-square over its degrees of freedom n is nearly normal, with mean
    1 - 2 / 9n and variance 2 / 9n. Right to 0.3 % for n >= 20.
    """
    upper_normal_quantile = 3.090232
    variance = 2.0 / (9.0 * num_degrees)
    return num_degrees * (1.0 - variance + upper_normal_quantile * math.sqrt(variance)) ** 3
