"""Meaning of process_logits, sample, top_p_candidates and token_logprobs."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.candidates import NOT_DRAWN, DraftedRows
from fastdeploy_sd.types import EMPTY_I32, F32, F64, I32, I64, DraftTokens, Rows, SamplingArrays

IN_PROMPT = 1 << 30
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def process_logits(logits: F32, rows: I32, cu_num_logits: I32, draft: DraftTokens, sampling: SamplingArrays) -> F32:
    """Apply grammars, penalties, logit_bias, then forbid tokens, as if the drafts on each row's path were output.

    Tokens that the row's grammar does not allow get -inf. Row j of request r sees draft j - 1 and those on its path.
    Repetition: the logit of a token in the prompt or the output is divided by the penalty if positive, else multiplied.
    Then frequency * count and presence are subtracted for tokens in the output, then logit_bias is added. A forbidden
    token gets -inf.

    Args:
        logits: f32[L, V].
        rows: i32[P], those to process.

    Source: arXiv:1909.05858 section 4.1 (repetition), OpenAI API reference (frequency, presence).
    """
    batch_id_per_output = np.repeat(np.arange(len(cu_num_logits) - 1, dtype=np.int32), np.diff(cu_num_logits))
    return _apply_rules(logits, batch_id_per_output, sampling, DraftedRows(cu_num_logits, draft))[rows]


def _apply_rules(logits: F32, batch_id_per_output: I32, sampling: SamplingArrays, drafted: DraftedRows | None) -> F32:
    y = logits.copy()
    for row, r in enumerate(batch_id_per_output):
        drafts = EMPTY_I32
        if drafted is not None:
            drafts = drafted.draft.row(r)[drafted.draft.path(r, row - drafted.cu_num_logits[r] - 1)]
        y[row] = _apply_row(logits[row], row, int(sampling.table_rows[r]), drafts, sampling)
    return y


def _apply_row(logits: F32, row: int, r: int, drafts: I32, sampling: SamplingArrays) -> F32:
    """`r` is the request's row of the columns, here and below."""
    logits = _keep_allowed(logits, row, sampling)
    y = _penalise(logits, sampling, r, drafts) if sampling.count_rows[r] >= 0 else logits.copy()
    num_bias = sampling.num_bias[r]
    np.add.at(y, sampling.bias_token_ids[r, :num_bias], sampling.bias_values[r, :num_bias])
    y[sampling.mask_token_ids[sampling.cu_mask[row] : sampling.cu_mask[row + 1]]] = -np.inf
    return y


def _keep_allowed(logits: F32, row: int, sampling: SamplingArrays) -> F32:
    allowed_row = int(sampling.allowed_rows[row])
    if allowed_row < 0:
        return logits
    token_ids = np.arange(len(logits))
    words = sampling.allowed_bits[allowed_row, token_ids // 32]
    return np.where(words >> (token_ids % 32) & 1, logits, np.float32(-np.inf))


def _penalise(logits: F32, sampling: SamplingArrays, r: int, drafts: I32) -> F32:
    seen = sampling.token_counts[sampling.count_rows[r]]
    count = (seen & (IN_PROMPT - 1)) + np.bincount(drafts, minlength=len(logits))
    repetition = sampling.repetition_penalty[r]
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    y = np.where((count > 0) | (seen & IN_PROMPT > 0), repeated, logits)
    penalised = y - sampling.frequency_penalty[r] * count.astype(np.float32) - sampling.presence_penalty[r]
    return np.where(count > 0, penalised, y).astype(np.float32)


def sample(
    logits: F32, batch_id_per_output: I32, positions: I32, sampling: SamplingArrays, drafted: DraftedRows | None = None
) -> I32:
    """Draw one token per row with the uniform of (seed, position), after the rules of process_logits.

    Args:
        logits: f32[L, V]; -inf forbids a token.
        batch_id_per_output, positions: i32[L], the request of each row, and the absolute position of its token.
        drafted: the drafts that rows follow; None = no row follows one.

    Returns:
        i32[L]; -1 for a row with NaN or +inf or without any finite logit; where drafts are verified, -2 for a row
        whose draft is not the token of the row that it follows.
    """
    ruled = _apply_rules(logits, batch_id_per_output, sampling, drafted)
    out = [
        _sample_row(row.astype(np.float64), int(position), sampling, int(sampling.table_rows[r]))
        for row, r, position in zip(ruled, batch_id_per_output, positions, strict=True)
    ]
    token_ids = np.array(out, np.int32)
    return _up_to_wrong_drafts(token_ids, drafted) if drafted is not None and drafted.is_verified else token_ids


def _up_to_wrong_drafts(token_ids: I32, drafted: DraftedRows) -> I32:
    for r in range(len(drafted.cu_num_logits) - 1):
        first, end = drafted.cu_num_logits[r : r + 2]
        guesses = drafted.draft.row(r)
        for j in range(1, end - first):
            parent = (drafted.draft.path(r, j - 1)[-2:-1] or [-1])[0] + 1
            if token_ids[first + parent] != guesses[j - 1]:
                token_ids[first + j] = NOT_DRAWN
    return token_ids


def _sample_row(logits: F64, position: int, sampling: SamplingArrays, r: int) -> int:
    if np.isnan(logits).any() or logits.max() == np.inf or logits.max() == -np.inf:
        return -1
    if sampling.temperature[r] == 0:
        return int(np.argmax(logits))
    probs = distribution(logits, sampling, r)
    cumulative = np.cumsum(probs)
    drawn = np.searchsorted(cumulative, philox_uniform(int(sampling.seed[r]), position) * cumulative[-1], side="right")
    return int(min(drawn, np.flatnonzero(probs)[-1]))


def distribution(logits: F64, sampling: SamplingArrays, r: int) -> F64:
    """Return the probabilities f64[V] of request r's next token: temperature, then min_p, then top_k, then top_p.

    Tokens are ordered by probability, equal ones by id. top_p keeps the shortest prefix of the order that weighs top_p
    of the whole or more, where the most likely token weighs 1. So tokens as likely as it add up exactly: of ten, 0.5
    keeps five. Other weights are rounded, and a prefix that misses top_p by less than that may be long enough.

    Source: top_p arXiv:1904.09751, min_p arXiv:2407.01082.
    """
    weights, order = _before_top_p(logits, sampling, r)
    if sampling.top_p[r] < 1.0:
        up_to = np.cumsum(weights[order])
        before = np.concatenate([[0.0], up_to[:-1]])
        weights[order[before >= np.float64(sampling.top_p[r]) * up_to[-1]]] = 0.0
    probs: F64 = weights / weights.sum()
    return probs


def _before_top_p(logits: F64, sampling: SamplingArrays, r: int) -> tuple[F64, I64]:
    """Weights f64[V], 1 for the best, by temperature, min_p and top_k; the ids of the kept tokens in the order."""
    scaled = (logits - logits.max()) / np.float64(sampling.temperature[r])
    with np.errstate(divide="ignore"):
        kept = (scaled >= np.log(np.float64(sampling.min_p[r]))) & (logits > -np.inf)
    order: I64 = np.argsort(-logits, kind="stable")
    if sampling.top_k[r] > 0:
        kept[order[sampling.top_k[r] :]] = False
    weights: F64 = np.where(kept, np.exp(scaled), 0.0)
    return weights, order[kept[order]]


def top_p_candidates(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    max_candidate_len: int,
    drafted: DraftedRows | None = None,
) -> tuple[I32, I32, I32]:
    """List the tokens that are plausible at each row, and draw one of them with the uniform u of (seed, position).

    The rules of process_logits come first. Candidates are the C most likely tokens that temperature, min_p and top_k
    leave, best first, ties to the lowest id; temperature 0 leaves one. The first n are usable: all if top_p is 1, which
    is no limit; else the shortest prefix whose summed probability, rounded to float32, reaches top_p; none where no
    prefix does. The token drawn is the first usable one at which the running sum reaches u * top_p, or else the
    most likely one.

    Arguments are those of `sample`, and max_candidate_len, C >= 1; drafts are not verified here.

    Returns:
        token_ids i32[L]; candidate_token_ids i32[L, C], -1 past the last candidate; candidate_lens i32[L], n. A row
        with NaN or +inf or without any finite logit has token -1 and no candidate.

    Source: FastDeploy, ops top_p_candidates and verify_draft_tokens; min_p, top_k, temperature 0, the seed and that
    top_p 1 never stops at a sum that rounding makes 1 are ours.
    """
    logits = _apply_rules(logits, batch_id_per_output, sampling, drafted)
    token_ids, lens = np.full(len(logits), -1, np.int32), np.zeros(len(logits), np.int32)
    candidate_token_ids = np.full((len(logits), max_candidate_len), -1, np.int32)
    for row, r in enumerate(sampling.table_rows[batch_id_per_output]):
        wide = logits[row].astype(np.float64)
        if np.isnan(wide).any() or wide.max() == np.inf or wide.max() == -np.inf:
            continue
        if sampling.temperature[r] == 0:
            token_ids[row] = candidate_token_ids[row, 0] = np.argmax(wide)
            lens[row] = 1
            continue
        weights, order = _before_top_p(wide, sampling, int(r))
        candidates = order[:max_candidate_len]
        candidate_token_ids[row, : len(candidates)] = candidates
        sums, top_p = np.cumsum(weights[candidates]) / weights.sum(), sampling.top_p[r]
        lens[row] = len(candidates)
        if top_p < 1:
            reaching = np.flatnonzero(sums.astype(np.float32) >= top_p)
            lens[row] = reaching[0] + 1 if len(reaching) > 0 else 0
        target = philox_uniform(int(sampling.seed[r]), int(positions[row])) * np.float64(top_p)
        token_ids[row] = candidates[np.argmax([*(sums[: lens[row]] >= target), False])]
    return token_ids, candidate_token_ids, lens


def token_logprobs(logits: F32, rows: Rows, token_ids: I32, num_top: int) -> tuple[F32, I32, I32, F32]:
    """Return the natural log-probability and rank of tokens, and the num_top most likely ones in their rows.

    Args:
        logits: f32[L, V]; -inf forbids a token.
        rows: i32[N], the row of logits of each token.

    Returns:
        logprobs f32[N]; ranks i32[N], 1 + tokens with a higher logit or an equal one and a lower id; top_token_ids
        i32[N, num_top] and top_logprobs f32[N, num_top], best first. A row with NaN or +inf or without any finite logit
        has NaN logprobs, rank 1 and the lowest ids.
    """
    wide = logits[rows].astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    invalid = ~np.isfinite(top[:, 0])
    with np.errstate(invalid="ignore"):
        logprobs = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    logprobs[invalid] = np.nan
    wide[invalid] = 0.0
    order = np.argsort(-wide, axis=1, kind="stable")
    places = np.arange(len(wide))
    ranks = np.argmax(order == token_ids[:, None], axis=1) + 1
    ranks[invalid] = 1
    top_token_ids = order[:, :num_top]
    return (
        logprobs[places, token_ids].astype(np.float32),
        ranks.astype(np.int32),
        top_token_ids.astype(np.int32),
        np.take_along_axis(logprobs, top_token_ids, axis=1).astype(np.float32),
    )


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words, by Philox4x32-10.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.
    """
    c0, c1, c2, c3 = counter
    for r in range(ROUNDS):
        k0, k1 = ((k + r * w) & WORD for k, w in zip(key, WEYL, strict=True))
        high0, low0 = divmod(MULTIPLIERS[0] * c0, 1 << 32)
        high1, low1 = divmod(MULTIPLIERS[1] * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def philox_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request with `seed`.

    The key is the seed, low word first; the counter is the position. The first two words, the first one high, give the
    53 bits of the fraction.
    """
    high, low, _, _ = philox4x32((position, 0, 0, 0), (seed & WORD, seed >> 32))
    return float(((high << 32 | low) >> 11) / (1 << 53))
