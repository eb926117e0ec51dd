"""LocalExecutor: loads a checkpoint and runs it in this process. Importing this module imports Paddle."""

from __future__ import annotations

import logging
import time

import fastdeploy_sd.worker.framework  # noqa: F401 (before anything that imports Paddle)
from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.checkpoint.token_ids import read_eos_token_ids
from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops import library, shim
from fastdeploy_sd.request_rules import producible_eos
from fastdeploy_sd.sampling.verify import VerifyRule
from fastdeploy_sd.spec_decode.mtp_passes import MtpTarget
from fastdeploy_sd.spec_decode.proposer import MakeProposer, ProposerContext, create_proposer
from fastdeploy_sd.spec_decode.router import available_methods
from fastdeploy_sd.types import ModelInfo, SchedulerOutput, SpeculationInfo, StepResult
from fastdeploy_sd.worker import kv_sizing, kv_tensors
from fastdeploy_sd.worker.draft_weights import open_draft_weights
from fastdeploy_sd.worker.forward import EagerForward, RecordedForward
from fastdeploy_sd.worker.free_memory import free_memory
from fastdeploy_sd.worker.model_loading import load_model
from fastdeploy_sd.worker.request_state import RequestTable
from fastdeploy_sd.worker.rotary import make_rotary
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


def create_executor(config: Config, make_proposer: MakeProposer = create_proposer) -> LocalExecutor:
    """Load the configured model and allocate its KV cache.

    Args:
        make_proposer: makes what drafts; the tests have others than the configured method.

    Raises:
        CheckpointError: the checkpoint or its draft layers are missing, malformed or of an unsupported architecture.
        ConfigError: an option contradicts the checkpoint, or what it asks for cannot be made: the drafting method, the
            Paddle operators of eager execution.
    """
    start = time.perf_counter()
    if config.num_threads is not None:
        library.set_num_threads(config.num_threads)
    if config.model.enforce_eager:
        _load_operators()
    checkpoint = Checkpoint(config.model.path)
    decoder_config = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    max_model_len = kv_sizing.max_model_len(config, decoder_config)
    eos_token_ids = producible_eos("checkpoint", read_eos_token_ids(checkpoint), decoder_config.vocab_size)
    # Opened first: that there are none must not be found out after the target was packed.
    draft_weights = open_draft_weights(config, checkpoint, decoder_config)
    model = load_model(config, checkpoint, decoder_config, draft_weights)
    decoder, draft = model.decoder, model.draft
    num_draft_layers = 0 if draft is None else draft.model.num_layers
    max_num_seqs, kv_format = config.scheduler.max_num_seqs, kv_sizing.KvCacheFormat.create(config)
    one_block = kv_sizing.block_bytes(decoder_config, kv_format, num_draft_layers)
    size = kv_sizing.choose_size(config, one_block, max_model_len, free_memory)
    count = size.num_blocks
    # No sequence outgrows the cache: tables by position need no more rows, whatever context the checkpoint claims.
    max_tokens = min(max_model_len, size.num_tokens + 1)
    caches = kv_tensors.allocate(decoder_config, count, kv_format, num_draft_layers)
    target = None
    if draft is not None:
        block_hidden = kv_tensors.allocate_block_hidden(decoder_config, count, kv_format, num_draft_layers)
        target = MtpTarget(
            draft.model,
            caches[-num_draft_layers:],
            make_rotary(draft.config, max_tokens),
            block_hidden,
            config.model.enforce_eager,
        )
    context = ProposerContext(max_num_seqs, max_tokens, decoder_config.vocab_size, target)
    proposer = make_proposer(config.speculative, context)
    s = config.speculative
    rule = VerifyRule(s.verify_strategy, s.accept_policy, s.max_candidate_len, s.verify_window)
    speculation = SpeculationInfo(
        method=s.method,
        methods=available_methods(s),
        max_draft_tokens=s.num_speculative_tokens,
        num_lookahead_slots=proposer.num_lookahead_slots,
        lossy=rule.is_lossy,
        has_draft_logprobs=s.enable_draft_logprob and draft is not None,
    )
    table = RequestTable(max_num_seqs, max_tokens, kv_format.block_size, decoder_config.vocab_size)
    forward_type = EagerForward if config.model.enforce_eager else RecordedForward
    forward = forward_type(decoder, caches[: decoder_config.num_layers], make_rotary(decoder_config, max_tokens))
    runner = ModelRunner(forward, kv_format.block_size, table, proposer, speculation, rule)
    info = ModelInfo(
        name=config.model.served_name,
        vocab_size=decoder_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        block_size=kv_format.block_size,
        num_blocks=count,
        speculation=speculation,
    )
    _log.info("KV cache: %s", size.describe(info.max_request_tokens))
    if info.max_request_tokens < max_model_len:
        _log.info(
            "the KV cache limits requests to %d tokens; the model's %d take kv_cache_memory_gb %.3f",
            info.max_request_tokens, max_model_len, -(-max_model_len // kv_format.block_size) * one_block / 2**30,
        )  # fmt: skip
    _log.info(
        "loaded %s in %.1f s: %s weights of %.2f GB, %d tokens of %s KV cache, requests of up to %d tokens, %s,"
        " %s kernels on %d threads",
        checkpoint.path, time.perf_counter() - start, config.model.quantization or config.model.dtype,
        model.weight_bytes / 1e9, size.num_tokens, kv_format.kv_dtype, info.max_request_tokens, _drafting(speculation),
        library.isa(), library.num_threads(),
    )  # fmt: skip
    return LocalExecutor(runner, info)


def _drafting(speculation: SpeculationInfo) -> str:
    if speculation.max_draft_tokens == 0:
        return "no drafting"
    return f"{speculation.max_draft_tokens} drafts by {speculation.method}"


def _load_operators() -> None:
    """Only eager execution calls Paddle operators; a recording is replayed by the kernel library alone."""
    try:
        shim.load()
    except ConfigError as error:
        raise ConfigError(f"enforce_eager: {error.message}", param="enforce_eager") from None
