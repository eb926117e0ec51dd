"""Verifying a step's drafts: the one logits pipeline; plain decoding is a step with zero drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fastdeploy_sd.device.device_buffers import HOST_BUFFERS, DeviceBuffers, Output, RowsOnDevice
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.ops.candidates import AcceptPolicy
from fastdeploy_sd.ops.sampling import SAMPLE, TOP_P_CANDIDATES, token_logprobs
from fastdeploy_sd.ops.verification import VERIFY_DRAFT_TOKENS
from fastdeploy_sd.types import F32, I32, LogprobArrays, SamplingArrays, VerifyResult

ACCEPT_POLICIES = {
    "normal": AcceptPolicy.NORMAL,
    "accept_all": AcceptPolicy.ACCEPT_ALL,
    "reject_all": AcceptPolicy.REJECT_ALL,
}


@dataclass(frozen=True, slots=True)
class VerifyRule:
    """How a server verifies drafts, as its checked configuration says.

    Attributes:
        strategy: "target_match" accepts the token that plain decoding draws there, "greedy" the most likely one at any
            temperature, "topp" one of the most likely tokens that together reach the request's top_p. At temperature 0
            each gives the output of plain decoding.
        accept_policy: "accept_all" and "reject_all" do not verify, to measure the cost and the most gain of drafts.
        max_candidate_len: "topp" only: how many of the most likely tokens are candidates at most.
        verify_window: "topp" only: how many most likely drafts must follow a second-best one for it to be accepted.
    """

    strategy: Literal["target_match", "greedy", "topp"] = "target_match"
    accept_policy: Literal["normal", "accept_all", "reject_all"] = "normal"
    max_candidate_len: int = 5
    verify_window: int = 2

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may branch: they are compared with what is drawn. Other rules know chains only."""
        return self.strategy != "topp" and self.accept_policy == "normal"

    @property
    def is_lossy(self) -> bool:
        """Whether the output may differ from plain decoding with the request's own sampling parameters."""
        return self.strategy != "target_match" or self.accept_policy == "accept_all"


class Verifier:
    """Verifies the drafts of step after step by the server's rule.

    Args:
        logits: f32[L, V], whole: row l belongs to token logits_indices[l] of the memory.
        buffers: of these arrays, where the logits are on a device.
    """

    def __init__(
        self,
        rule: VerifyRule,
        memory: StepMemory,
        sampling: SamplingArrays,
        logits: F32 | RowsOnDevice,
        buffers: DeviceBuffers = HOST_BUFFERS,
    ) -> None:
        m = self._memory = memory
        self._num_logprobs, self._logits, self._buffers = sampling.num_logprobs, logits, buffers
        if rule.strategy == "greedy":
            sampling = replace(sampling, temperature=np.zeros_like(sampling.temperature))
        drafted = {
            "cu_num_logits": m.cu_num_logits,
            "draft_token_ids": m.draft_token_ids,
            "cu_num_draft": m.cu_num_draft,
            "parent_rows": m.parent_rows if rule.takes_trees else None,
        }
        num_rows, candidates = len(logits), {}
        sampled = np.zeros(num_rows, np.int32)
        rows = SAMPLE.arguments_in(sampling) | drafted
        rows |= {"logits": logits, "batch_id_per_output": m.batch_id_per_output, "positions": m.output_positions}
        if rule.strategy == "topp":
            candidates = {
                "candidate_token_ids": np.zeros((num_rows, min(rule.max_candidate_len, logits.shape[1])), np.int32),
                "candidate_lens": np.zeros(num_rows, np.int32),
            }
        # Verifying by equality reads no row after a wrong draft; a policy that accepts or rejects all may.
        rows["stops_at_wrong_draft"] = not candidates and rule.accept_policy == "normal"
        length = candidates["candidate_token_ids"].shape[1] if candidates else 0
        self._draw = (
            buffers.bind(TOP_P_CANDIDATES, **rows, **candidates, max_candidate_len=length, token_ids=sampled)
            if candidates
            else buffers.bind(SAMPLE, **rows, token_ids=sampled)
        )
        self._accept = buffers.bind(
            VERIFY_DRAFT_TOKENS,
            **drafted,
            **candidates,
            sampled_token_ids=sampled,
            accept_policy=int(ACCEPT_POLICIES[rule.accept_policy]),
            max_candidate_len=length,
            verify_window=rule.verify_window,
            token_ids=m.output_token_ids,
            output_rows=m.output_rows,
            cu_num_output=m.cu_num_output,
            num_accepted=m.num_accepted,
            num_failed=m.num_failed,
        )

    def start(self) -> Output:
        """Draw the target's token at every logits row, keep a path of the drafts and emit the token after it.

        The token at absolute position p is drawn with the uniform of (seed, p), and penalties count the drafts on the
        row's path as output. So a row gets the token that plain decoding draws once these are accepted. Log-
        probabilities are of the raw logits. The output may go on after a token that ends its request. Raises
        ValueError: an offset or a parameter is out of its range; the text names it.
        """
        m, draw, accept = self._memory, self._draw, self._accept
        draw.params.num_rows = m.num_logits
        draw.params.num_requests = accept.params.num_requests = m.num_requests
        self._buffers.send_masks()
        draw.run()
        accept.run()
        return self._buffers.start_fetch()

    def finish(
        self,
        output: Output,
        num_requests: int,
        cu_num_logits: I32,
        *,
        has_reports: bool = True,
        has_trees: bool = False,
    ) -> tuple[VerifyResult, tuple[int, ...]]:
        """Wait for the output of `start`; return the result and the rows of failed requests; may raise ValueError.

        A request fails where a used logits row had no valid distribution: it has no output and no accepted draft.
        Verifying by equality uses no row after a wrong draft, so it fails where plain decoding fails.

        Args:
            num_requests, cu_num_logits: of that step, R and i32[R+1].
            has_reports: False = no request wants log-probabilities. Else the memory still has that step.
            has_trees: whether its drafts branch.
        """
        output.take()
        m = self._memory
        cu_num_output = m.cu_num_output[: num_requests + 1]
        result = VerifyResult(
            m.output_token_ids[: cu_num_output.item(-1)], cu_num_output, m.num_accepted[:num_requests]
        )
        if has_trees:
            begins = np.repeat(cu_num_logits[:num_requests], np.diff(cu_num_output))
            result = replace(result, nodes=m.output_rows[: len(begins)] - begins)
        if has_reports:
            wanted = self._num_logprobs.take(m.table_rows[: m.num_requests])
            if (wanted >= 0).any():
                result = replace(result, logprobs=self._logprobs(wanted, result))
        return result, _failed_rows(cu_num_logits, cu_num_output) if m.num_failed.item(0) else ()

    def _logprobs(self, wanted: I32, result: VerifyResult) -> LogprobArrays:
        """Log-probabilities of the output tokens of requests that asked; other outputs have NaN and rank 0."""
        counts = np.diff(result.cu_num_output)
        rows = self._memory.output_rows
        asked = np.flatnonzero(np.repeat(wanted >= 0, counts))
        num_top = min(int(wanted.max()), self._logits.shape[1])
        found = LogprobArrays(*token_logprobs(self._logits, rows[asked], result.token_ids[asked], num_top))
        out = LogprobArrays.empty(len(result.token_ids), num_top)
        out.put(asked, found)
        return out


def _failed_rows(cu_num_logits: I32, cu_num_output: I32) -> tuple[int, ...]:
    """A row with logits always has output, unless it failed."""
    num_logits = np.diff(cu_num_logits[: len(cu_num_output)])
    return tuple(np.flatnonzero((num_logits > 0) & (np.diff(cu_num_output) == 0)).tolist())
