"""process_logits, sample, top_p_candidates and token_logprobs on Paddle tensors.

Logits stay on their device. Per-request columns come from the host. What an op returns as NumPy is a result of the
step; copying it to the host is the op's part.
"""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.processed_logits import ProcessedLogits
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.types import I32, DraftTokens, LogprobArrays, SamplingArrays


def process_logits(
    logits: Tensor, rows: I32, cu_num_logits: I32, draft: DraftTokens, sampling: SamplingArrays
) -> Tensor:
    """Apply penalties, logit_bias and forbidden tokens; see `reference.sampling.process_logits`.

    Args:
        logits: f32[L, V].
        rows: i32[P], those to process.
        cu_num_logits: i32[R+1], rows of each request; row j counts the request's first j drafts as output.

    Returns:
        f32[P, V], a new tensor.

    Raises:
        ValueError: a shape, dtype or offset disagrees, a row is none, or a token id is outside the vocabulary.
    """
    columns = (
        rows,
        cu_num_logits,
        draft.token_ids,
        draft.cu_num_draft,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.penalty_slot,
        sampling.token_counts,
        sampling.cu_bias,
        sampling.bias_token_ids,
        sampling.bias_values,
        sampling.cu_mask,
        sampling.mask_token_ids,
    )
    (y,) = shim.run("process_logits", logits, *(from_numpy(column) for column in columns))
    return y


def sample(
    logits: Tensor,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    processed: ProcessedLogits[Tensor] | None = None,
    drafted: DraftedRows | None = None,
) -> I32:
    """Draw one token per row with the uniform of (seed, position); see `reference.sampling.sample`.

    Args:
        logits: f32[L, V].
        batch_id_per_output: i32[L], the request of each row.
        positions: i32[L], absolute position of the token to draw.
        processed: rows to draw from in place of the raw ones.
        drafted: stop at each request's first wrong draft; None = draw every row.

    Returns:
        i32[L]; -1 for a row with NaN or +inf or without any finite logit, -2 for one behind a wrong draft.

    Raises:
        ValueError: a shape, dtype or offset disagrees, or a parameter is out of its range.
    """
    columns = _sample_columns(batch_id_per_output, positions, sampling)
    (token_ids,) = shim.run("sample", logits, *columns, *_replacing(processed), *_followed(drafted))
    ids: I32 = token_ids.numpy()
    return ids


def top_p_candidates(
    logits: Tensor,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    max_candidate_len: int,
    processed: ProcessedLogits[Tensor] | None = None,
) -> tuple[I32, I32, I32]:
    """List each row's plausible tokens and draw one of them; see `reference.sampling.top_p_candidates`.

    Args:
        logits: f32[L, V].
        batch_id_per_output: i32[L], the request of each row.
        positions: i32[L], absolute position of the token to draw.
        max_candidate_len: C >= 1.
        processed: rows to draw from in place of the raw ones.

    Returns:
        token_ids i32[L], candidate_token_ids i32[L, C], candidate_lens i32[L].

    Raises:
        ValueError: a shape or dtype disagrees, a parameter is out of its range, or max_candidate_len is below 1.
    """
    columns = _sample_columns(batch_id_per_output, positions, sampling)
    token_ids, candidate_token_ids, candidate_lens = (
        out.numpy() for out in shim.run("top_p_candidates", logits, *columns, *_replacing(processed), max_candidate_len)
    )
    return token_ids, candidate_token_ids, candidate_lens


def _sample_columns(batch_id_per_output: I32, positions: I32, sampling: SamplingArrays) -> list[Tensor]:
    columns = (
        batch_id_per_output,
        positions,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
    )
    return [from_numpy(column) for column in columns]


def _replacing(processed: ProcessedLogits[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if processed is None else (processed.logits, from_numpy(processed.row_of))


def _followed(drafted: DraftedRows | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if drafted is None:
        return None, None, None
    draft = drafted.draft
    return from_numpy(drafted.cu_num_logits), from_numpy(draft.token_ids), from_numpy(draft.cu_num_draft)


def token_logprobs(logits: Tensor, token_ids: I32, num_top: int) -> LogprobArrays:
    """Return log-probability and rank of one token per row and of the num_top best ones.

    Args:
        logits: f32[L, V], as the model gave them.
        token_ids: i32[L].

    Raises:
        ValueError: a shape or dtype disagrees, a token id is outside the vocabulary, or num_top exceeds it.
    """
    return LogprobArrays(*(out.numpy() for out in shim.run("token_logprobs", logits, from_numpy(token_ids), num_top)))
