"""Judging a step's drafts: the one logits pipeline for naive and speculative decoding.

A request without drafts is a request with zero of them, so plain decoding runs this code and nothing else. Knows the
step's Batch and its logits; knows no model, no scheduler and no proposer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.native.sampling import verify_draft_tokens
from fastdeploy_sd.ops.sampling import process_logits, sample, token_logprobs
from fastdeploy_sd.types import I32, Batch, LogprobArrays, SamplingArrays, VerifyResult

VERIFY_STRATEGIES = ("target_match", "greedy")
FAILED_DRAW = -1


@dataclass(frozen=True, slots=True)
class VerifyRule:
    """How a server judges drafts, for all its requests.

    Attributes:
        strategy: "target_match", "greedy" or "topp".
        accept_policy: "normal" judges; "accept_all" and "reject_all" do not look, to measure what drafting costs or
            could bring.
        max_candidate_len: "topp" only: how many of the most likely tokens are plausible at most.
        verify_window: "topp" only: how many most likely drafts must follow a second-best one for it to be kept.
    """

    strategy: Literal["target_match", "greedy", "topp"] = "target_match"
    accept_policy: Literal["normal", "accept_all", "reject_all"] = "normal"
    max_candidate_len: int = 5
    verify_window: int = 2

    @property
    def is_lossy(self) -> bool:
        """Whether the output may differ from plain decoding with the request's own sampling parameters."""
        return self.strategy != "target_match" or self.accept_policy == "accept_all"


def verify(logits: Tensor, batch: Batch, rule: VerifyRule) -> tuple[VerifyResult, tuple[int, ...]]:
    """Draw the target's token at every logits row and keep the drafts that are the same.

    The token at absolute position p of a request is drawn with the uniform of (seed, p), penalties counting the drafts
    before it as output: row j gets exactly the token plain decoding would draw once the first j drafts are accepted, so
    the output never depends on the drafts. Log-probabilities are of the raw logits.

    Args:
        logits: f32[L, V], row l belongs to token batch.logits_indices[l].
        batch: the step that gave the logits.
        rule: the server's.

    Returns:
        The result and the rows of requests that failed: one of their used logits rows had no valid distribution. A
        failed row has no output and no accepted draft.

    Raises:
        ConfigError: the strategy is unknown or not supported.
    """
    sampling = _with_strategy(batch.sampling, rule.strategy)
    processed = logits
    if _needs_processing(sampling):
        processed = process_logits(logits, batch.cu_num_logits, batch.draft, sampling)
    positions = batch.positions[batch.logits_indices] + 1
    sampled = sample(processed, batch.batch_id_per_output, positions, sampling)
    result, failed = _without_failed(VerifyResult(*verify_draft_tokens(sampled, batch.cu_num_logits, batch.draft)))
    if (sampling.num_logprobs >= 0).any():
        result = replace(result, logprobs=_logprobs(logits, batch, result))
    return result, failed


def _with_strategy(sampling: SamplingArrays, strategy: str) -> SamplingArrays:
    if strategy == "target_match":
        return sampling
    if strategy == "greedy":
        return replace(sampling, temperature=np.zeros_like(sampling.temperature))
    if strategy == "topp":
        raise ConfigError("verify_strategy: 'topp' is not supported yet; expected target_match or greedy")
    wanted = " or ".join(VERIFY_STRATEGIES)
    raise ConfigError(f"verify_strategy: expected {wanted}, got {strategy!r}{suggest(strategy, VERIFY_STRATEGIES)}")


def _needs_processing(sampling: SamplingArrays) -> bool:
    has_penalty = bool((sampling.penalty_slot >= 0).any())
    return has_penalty or len(sampling.bias_token_ids) > 0 or len(sampling.mask_token_ids) > 0


def _without_failed(result: VerifyResult) -> tuple[VerifyResult, tuple[int, ...]]:
    """Drop requests whose used rows hold a failed draw: it equals no draft, so it can only be the last output."""
    counts = np.diff(result.cu_num_output)
    has_failed = np.zeros(len(counts), np.bool_)
    has_output = counts > 0
    has_failed[has_output] = result.token_ids[result.cu_num_output[1:][has_output] - 1] == FAILED_DRAW
    if not has_failed.any():
        return result, ()
    kept: npt.NDArray[np.bool_] = ~np.repeat(has_failed, counts)
    cu_num_output = np.concatenate([[0], np.cumsum(np.where(has_failed, 0, counts))]).astype(np.int32)
    num_accepted = np.where(has_failed, 0, result.num_accepted).astype(np.int32)
    return VerifyResult(result.token_ids[kept], cu_num_output, num_accepted), tuple(np.flatnonzero(has_failed).tolist())


def _logprobs(logits: Tensor, batch: Batch, result: VerifyResult) -> LogprobArrays:
    """Log-probabilities of the output tokens of requests that asked; other outputs have NaN and rank 0.

    Alternatives are as many as the request that wants most, or the whole vocabulary where that is smaller.
    """
    wanted = batch.sampling.num_logprobs
    counts = np.diff(result.cu_num_output)
    num_outputs = len(result.token_ids)
    first_rows = batch.cu_num_logits[:-1] - result.cu_num_output[:-1]
    rows: I32 = (np.repeat(first_rows, counts) + np.arange(num_outputs)).astype(np.int32)
    asked = np.flatnonzero(np.repeat(wanted >= 0, counts))
    num_top = min(int(wanted.max()), int(logits.shape[1]))
    found = token_logprobs(gather_output_rows(logits, rows[asked]), result.token_ids[asked], num_top)
    out = LogprobArrays(
        logprobs=np.full(num_outputs, np.nan, np.float32),
        ranks=np.zeros(num_outputs, np.int32),
        top_token_ids=np.zeros((num_outputs, num_top), np.int32),
        top_logprobs=np.full((num_outputs, num_top), np.nan, np.float32),
    )
    for field in fields(out):
        getattr(out, field.name)[asked] = getattr(found, field.name)
    return out
