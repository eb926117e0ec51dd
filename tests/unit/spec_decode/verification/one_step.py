"""One step verified by itself: memory of exactly its size, filled by hand."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.spec_decode.verify import Verifier, VerifyRule
from fastdeploy_sd.types import F32, I32, DraftTokens, SamplingArrays, VerifyResult


def verify_once(
    rule: VerifyRule,
    logits: F32,
    cu_num_logits: I32,
    output_positions: I32,
    draft: DraftTokens,
    sampling: SamplingArrays,
) -> tuple[VerifyResult, tuple[int, ...]]:
    num_requests = len(cu_num_logits) - 1
    num_draft = np.diff(draft.cu_num_draft)
    memory = StepMemory(StepLimits(num_requests, len(logits), int(num_draft.max())), logits.shape[1])
    memory.num_requests, memory.num_logits = num_requests, len(logits)
    memory.table_rows[:] = sampling.table_rows
    memory.draft_token_ids[: len(draft.token_ids)] = draft.token_ids
    memory.cu_num_draft[:] = draft.cu_num_draft
    memory.cu_num_logits[:] = cu_num_logits
    memory.batch_id_per_output[:] = np.repeat(np.arange(num_requests), np.diff(cu_num_logits))
    memory.output_positions[:] = output_positions
    memory.parent_rows[:] = np.arange(len(logits)) - np.repeat(cu_num_logits[:-1], np.diff(cu_num_logits)) - 1
    verifier = Verifier(rule, memory, sampling, logits)
    return verifier.finish(verifier.start(), memory.num_requests, memory.cu_num_logits)
