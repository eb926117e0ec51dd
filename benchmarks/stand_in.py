"""A worker without a model: the real runner, table, verification and drafting around a stand-in for the forward pass.

The stand-in reads a buffer, as a model reads its weights: what a step's host code finds in the caches then is as little
as in a server, and costs it two to three times as much. Its text counts upwards and jumps now and then, so that n-gram
and suffix decoding draft, and most of their drafts are right; or it is of random tokens, and there is nothing to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.spec_decode.dispatcher import available_methods, create_proposer
from fastdeploy_sd.spec_decode.proposer import ProposerContext
from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.types import I64, ModelInfo, SpeculationInfo
from fastdeploy_sd.worker.executor import LocalExecutor
from fastdeploy_sd.worker.kv.kv_identity import KvIdentity
from fastdeploy_sd.worker.kv.kv_pages import KvPages
from fastdeploy_sd.worker.step.drafting import Drafting
from fastdeploy_sd.worker.step.forward import StepResources
from fastdeploy_sd.worker.step.guided_rows import GuidedRows
from fastdeploy_sd.worker.step.prompt_rows import PromptRows
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.runner import ModelRunner

BLOCK_SIZE = 64
VOCAB_SIZE = 4096
# Tokens until the count starts anew, and the share of tokens that are not the next of the count.
_PERIOD = 16
_JUMPS = 0.2


class StandInModel:
    """See Forward.

    Args:
        memory: of the steps.
        buffer: read in every step.
        is_random: its text.
    """

    def __init__(self, memory: StepMemory, buffer: I64, *, is_random: bool = False) -> None:
        self._memory, self._is_random = memory, is_random
        self.logits = np.zeros((memory.limits.num_logits, VOCAB_SIZE), np.float32)
        self._buffer, self._random = buffer, np.random.default_rng(0)
        self.hidden: Any = None  # of interest to methods with a model only
        self.draft_rows: Sequence[Any] = ()
        self._said = np.zeros(0, np.int64)

    def __call__(self) -> None:
        """Read the buffer, and say the next token of every row's count."""
        self._buffer.sum()
        rows = np.arange(len(self._said))
        self.logits[rows, self._said] = 0.0
        m = self._memory
        last = m.input_ids[m.logits_indices[: m.num_logits]]
        if self._is_random:
            self._said = self._random.integers(0, VOCAB_SIZE, len(last))
        else:
            jumps = self._random.random(len(last)) < _JUMPS
            self._said = np.where(jumps, self._random.integers(0, _PERIOD, len(last)), (last + 1) % _PERIOD)
        self.logits[np.arange(len(last)), self._said] = 1.0


def stand_in_executor(
    speculative: SpeculativeConfig,
    max_num_seqs: int,
    max_model_len: int,
    buffer: I64,
    *,
    is_random: bool = False,
) -> LocalExecutor:
    """Make an executor as `create_executor` does, but without a model.

    Raises:
        ConfigError: the method needs a model.
    """
    num_drafts = speculative.num_speculative_tokens
    context = ProposerContext(max_num_seqs, max_model_len, VOCAB_SIZE)
    proposer = create_proposer(speculative, context)
    table = RequestTable(max_num_seqs, max_model_len, BLOCK_SIZE, VOCAB_SIZE)
    speculation = SpeculationInfo(speculative.method, available_methods(speculative), num_drafts)
    memory = StepMemory(StepLimits(max_num_seqs, max_num_seqs * max_model_len, num_drafts), VOCAB_SIZE)
    model, prompts = StandInModel(memory, buffer, is_random=is_random), PromptRows(None, memory, table)
    step = StepResources(model, lambda: None, prompts, memory, table)
    guided = GuidedRows(None, memory, max_num_seqs)
    drafting = Drafting(proposer, step, guided, speculation, context.step_stats, is_lossy=False)
    runner = ModelRunner(step, drafting, VerifyRule(), guided)
    num_blocks = max_num_seqs * (max_model_len // BLOCK_SIZE + 2)
    info = ModelInfo("stand-in", VOCAB_SIZE, max_model_len, (), BLOCK_SIZE, num_blocks, speculation)
    return LocalExecutor(runner, info, KvPages(()), KvIdentity("CPU", "stand-in", "", "float32", BLOCK_SIZE, 0, 0, 0))
