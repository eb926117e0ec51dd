"""Judging a step's drafts: the one logits pipeline for naive and speculative decoding.

A request without drafts is a request with zero of them, so plain decoding runs this code and nothing else. Knows the
step's Batch and its logits; knows no model, no scheduler and no proposer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates, DraftedRows
from fastdeploy_sd.ops.native.sampling import Sampler, token_logprobs
from fastdeploy_sd.ops.native.verification import DraftJudge
from fastdeploy_sd.types import F32, I32, Batch, LogprobArrays, SamplingArrays, VerifyResult

VERIFY_STRATEGIES = ("target_match", "greedy", "topp")
ACCEPT_POLICIES = {
    "normal": AcceptPolicy.NORMAL,
    "accept_all": AcceptPolicy.ACCEPT_ALL,
    "reject_all": AcceptPolicy.REJECT_ALL,
}


@dataclass(frozen=True, slots=True)
class VerifyRule:
    """How a server judges drafts, for all its requests.

    Attributes:
        strategy: what a draft must be to be kept. "target_match": the token that plain decoding draws there, so the
            output is that of plain decoding. "greedy": the most likely token, whatever the request's temperature; also
            what is emitted after the drafts. "topp": one of the most likely tokens that together reach the request's
            top_p, from which the token after the drafts is drawn too; a request with temperature 0 gets what plain
            decoding gives.
        accept_policy: "normal" judges; "accept_all" and "reject_all" do not look, to measure what drafting costs or
            could bring.
        max_candidate_len: "topp" only: how many of the most likely tokens are plausible at most.
        verify_window: "topp" only: how many most likely drafts must follow a second-best one for it to be kept.

    Raises:
        ConfigError: an unknown strategy or policy, max_candidate_len below 1, or verify_window below 0.
    """

    strategy: Literal["target_match", "greedy", "topp"] = "target_match"
    accept_policy: Literal["normal", "accept_all", "reject_all"] = "normal"
    max_candidate_len: int = 5
    verify_window: int = 2

    def __post_init__(self) -> None:
        _verify_choice("verify_strategy", self.strategy, VERIFY_STRATEGIES)
        _verify_choice("accept_policy", self.accept_policy, ACCEPT_POLICIES)
        if self.max_candidate_len < 1:
            raise ConfigError(f"max_candidate_len: expected >= 1, got {self.max_candidate_len}")
        if self.verify_window < 0:
            raise ConfigError(f"verify_window: expected >= 0, got {self.verify_window}")

    @property
    def is_lossy(self) -> bool:
        """Whether the output may differ from plain decoding with the request's own sampling parameters."""
        return self.strategy != "target_match" or self.accept_policy == "accept_all"


def _verify_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        wanted = " or ".join(choices)
        raise ConfigError(f"{name}: expected {wanted}, got {value!r}{suggest(value, choices)}")


class Verifier:
    """Judges the drafts of step after step by the server's rule."""

    def __init__(self, rule: VerifyRule) -> None:
        self._rule = rule
        self._is_judged = rule.strategy != "topp" and rule.accept_policy == "normal"
        self._sampler: Sampler | None = None
        self._judge = DraftJudge(ACCEPT_POLICIES[rule.accept_policy], rule.verify_window)
        self._last: tuple[F32, Batch] | None = None
        self._columns: tuple[SamplingArrays, tuple[SamplingArrays, bool]] | None = None
        self._result: VerifyResult | None = None

    def verify(self, logits: F32, batch: Batch) -> tuple[VerifyResult, tuple[int, ...]]:
        """Draw the target's token at every logits row, keep a prefix of the drafts and emit the token after it.

        The token at absolute position p of a request is drawn with the uniform of (seed, p), penalties counting the
        drafts before it as output: row j gets exactly the token plain decoding would draw once the first j drafts are
        accepted. Under "target_match" a draft is kept only if it is that token, so the output never depends on the
        drafts; which other strategies and policies keep, see VerifyRule. Log-probabilities are of the raw logits.

        The output may go on after a token that ends its request: where a request ends is for the caller to decide.

        Args:
            logits: f32[L, V], row l belongs to token batch.logits_indices[l].
            batch: the step that gave the logits. Both are the same objects as last time if only what is in their
                arrays differs.

        Returns:
            The result, which holds until the next step, and the rows of requests that failed: one of their used logits
            rows had no valid distribution. A failed row has no output and no accepted draft. Judging by equality uses
            the rows before such a row only, so that a request fails with the output that plain decoding gives it; the
            others fail a step with any.
        """
        token_ids, cu_num_output, num_accepted = self._judged(logits, batch)
        result = self._result
        if result is None or not (
            result.token_ids is token_ids
            and result.cu_num_output is cu_num_output
            and result.num_accepted is num_accepted
        ):
            result = self._result = VerifyResult(token_ids, cu_num_output, num_accepted)
        if self._columns_of(batch.sampling)[1]:
            result = replace(result, logprobs=_logprobs(logits, batch, result))
        return result, _failed_rows(batch, result) if self._judge.num_failed else ()

    def _judged(self, logits: F32, batch: Batch) -> tuple[I32, I32, I32]:
        """Output tokens, their offsets and the numbers of accepted drafts."""
        sampler = self._sampler
        if sampler is not None and self._last is not None and self._last[0] is logits and self._last[1] is batch:
            sampler.draw_again()
            return self._judge.judge_again()
        self._last = None  # until everything was drawn and judged once
        is_topp = self._rule.strategy == "topp"
        if sampler is None:
            sampler = self._sampler = Sampler(min(self._rule.max_candidate_len, logits.shape[1]) if is_topp else None)
        # Judging by equality looks at no row behind a wrong draft; a policy that does not judge may look at any.
        drafted = DraftedRows(batch.cu_num_logits, batch.draft, self._is_judged)
        sampling, _ = self._columns_of(batch.sampling)
        sampled = sampler.draw(logits, batch.batch_id_per_output, batch.output_positions, sampling, drafted)
        candidates = Candidates(*sampler.candidates(len(sampled)), self._rule.verify_window) if is_topp else None
        judged = self._judge.judge(sampled, batch.cu_num_logits, batch.draft, candidates)
        self._last = logits, batch
        return judged

    def _columns_of(self, sampling: SamplingArrays) -> tuple[SamplingArrays, bool]:
        """The requests' parameters as the strategy wants them, and whether any request wants log-probabilities."""
        if self._columns is None or self._columns[0] is not sampling:
            judged = sampling
            if self._rule.strategy == "greedy":
                judged = replace(sampling, temperature=np.zeros_like(sampling.temperature))
            self._columns = sampling, (judged, bool(sampling.num_logprobs.max(initial=-1) >= 0))
        return self._columns[1]


def _failed_rows(batch: Batch, result: VerifyResult) -> tuple[int, ...]:
    """A row with logits always has output, unless it failed."""
    num_logits, num_output = np.diff(batch.cu_num_logits), np.diff(result.cu_num_output)
    return tuple(np.flatnonzero((num_logits > 0) & (num_output == 0)).tolist())


def _logprobs(logits: F32, batch: Batch, result: VerifyResult) -> LogprobArrays:
    """Log-probabilities of the output tokens of requests that asked; other outputs have NaN and rank 0.

    Alternatives are as many as the request that wants most, or the whole vocabulary where that is smaller.
    """
    wanted = batch.sampling.num_logprobs
    counts = np.diff(result.cu_num_output)
    num_outputs = len(result.token_ids)
    first_rows = batch.cu_num_logits[:-1] - result.cu_num_output[:-1]
    rows = np.repeat(first_rows, counts) + np.arange(num_outputs)
    asked = np.flatnonzero(np.repeat(wanted >= 0, counts))
    num_top = min(int(wanted.max()), logits.shape[1])
    found = LogprobArrays(*token_logprobs(logits[rows[asked]], result.token_ids[asked], num_top))
    out = LogprobArrays(
        logprobs=np.full(num_outputs, np.nan, np.float32),
        ranks=np.zeros(num_outputs, np.int32),
        top_token_ids=np.zeros((num_outputs, num_top), np.int32),
        top_logprobs=np.full((num_outputs, num_top), np.nan, np.float32),
    )
    for field in fields(out):
        getattr(out, field.name)[asked] = getattr(found, field.name)
    return out
