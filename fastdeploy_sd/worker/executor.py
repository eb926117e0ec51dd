"""LocalExecutor: loads a checkpoint and runs it in this process. Importing this module imports Paddle."""

from __future__ import annotations

import logging
import time

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.checkpoint.token_ids import read_eos_token_ids
from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops import library
from fastdeploy_sd.quantization.scheme import QuantScheme
from fastdeploy_sd.sampling.verify import VerifyRule
from fastdeploy_sd.spec_decode.proposer import Proposer, ProposerContext, create_proposer
from fastdeploy_sd.types import ModelInfo, SchedulerOutput, SpeculationInfo, StepResult
from fastdeploy_sd.worker import kv_tensors
from fastdeploy_sd.worker.request_state import RequestTable
from fastdeploy_sd.worker.runner import ModelRunner

_log = logging.getLogger(__name__)


class LocalExecutor:
    """The model in this process; see engine.executor.Executor."""

    def __init__(self, runner: ModelRunner, model_info: ModelInfo) -> None:
        self._runner: ModelRunner | None = runner
        self._model_info = model_info

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    def execute(self, plan: SchedulerOutput) -> StepResult:
        assert self._runner is not None, "execute() after shutdown()"
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None


def create_executor(config: Config, proposer: Proposer | None = None) -> LocalExecutor:
    """Load the configured model and allocate its KV cache.

    Args:
        proposer: used instead of the configured method (the tests' doubles).

    Raises:
        CheckpointError: the checkpoint is missing, malformed or of an unsupported architecture.
        ConfigError: an option contradicts the checkpoint.
    """
    start = time.perf_counter()
    if config.num_threads is not None:
        library.set_num_threads(config.num_threads)
    checkpoint = Checkpoint(config.model.path)
    decoder_config = read_decoder_config(checkpoint.config)
    max_model_len = config.model.max_model_len or decoder_config.max_position
    if max_model_len > decoder_config.max_position:
        raise ConfigError(
            f"max_model_len: expected at most the checkpoint's {decoder_config.max_position}, got {max_model_len}",
            param="max_model_len",
        )
    scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
    decoder = Decoder(checkpoint, decoder_config, scheme)
    count = kv_tensors.num_blocks(decoder_config, config.cache, config.model.dtype)
    block_size = config.cache.block_size
    max_num_seqs = config.scheduler.max_num_seqs
    caches = kv_tensors.allocate(decoder_config, count, block_size, config.model.dtype)
    context = ProposerContext(max_num_seqs, max_model_len, decoder_config.vocab_size)
    proposer = proposer or create_proposer(config.speculative, context)
    s = config.speculative
    rule = VerifyRule(s.verify_strategy, s.accept_policy, s.max_candidate_len, s.verify_window)
    speculation = SpeculationInfo(
        config.speculative.method,
        (config.speculative.method,),
        config.speculative.num_speculative_tokens,
        proposer.num_lookahead_slots,
    )
    table = RequestTable(max_num_seqs, max_model_len, block_size, decoder_config.vocab_size)
    runner = ModelRunner(decoder, caches, table, proposer, speculation, rule)
    info = ModelInfo(
        name=config.model.served_name,
        vocab_size=decoder_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(checkpoint),
        block_size=block_size,
        num_blocks=count,
        speculation=speculation,
    )
    _log.info(
        "loaded %s in %.1f s: %s, %d KV blocks of %d tokens, %s kernels on %d threads",
        checkpoint.path, time.perf_counter() - start, scheme.linear, count, block_size, library.isa(),
        library.num_threads(),
    )  # fmt: skip
    return LocalExecutor(runner, info)
