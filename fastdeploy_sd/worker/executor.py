"""LocalExecutor: loads a checkpoint and runs it in this process. Importing this module imports Paddle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import fastdeploy_sd.worker.framework  # noqa: F401 (before anything that imports Paddle)
from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.checkpoint.token_ids import read_eos_token_ids
from fastdeploy_sd.config import Config
from fastdeploy_sd.guidance.compiler import GrammarStore
from fastdeploy_sd.layers.tp_group import TpGroup
from fastdeploy_sd.models.mtp_weights import MtpWeights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.mtp_batch import KeptRows
from fastdeploy_sd.request_rules import producible_eos
from fastdeploy_sd.runtime import library
from fastdeploy_sd.sampling.verify import VerifyRule
from fastdeploy_sd.spec_decode.draft_model import DraftModel
from fastdeploy_sd.spec_decode.proposer import MakeProposer, Proposer, ProposerContext
from fastdeploy_sd.spec_decode.router import available_methods, create_layers_method, create_proposer
from fastdeploy_sd.spec_decode.step_board import StepBoard
from fastdeploy_sd.step_memory import StepLimits, StepMemory
from fastdeploy_sd.types import ModelInfo, SchedulerOutput, SpeculationInfo, StepResult
from fastdeploy_sd.worker import kv_sizing
from fastdeploy_sd.worker.block_copier import BlockCopier
from fastdeploy_sd.worker.draft_layers import DraftLayers
from fastdeploy_sd.worker.draft_weights import open_draft_weights
from fastdeploy_sd.worker.eager_operators import load_operators
from fastdeploy_sd.worker.follower import ModelFollower
from fastdeploy_sd.worker.forced_tokens import ForcedTokens
from fastdeploy_sd.worker.forward import EagerForward, Forward, RecordedForward
from fastdeploy_sd.worker.grammars import open_grammars
from fastdeploy_sd.worker.guided_rows import GuidedRows
from fastdeploy_sd.worker.kept_hidden import allocate_kept_hidden, keeping
from fastdeploy_sd.worker.kept_measurements import machine_key, measurements_folder
from fastdeploy_sd.worker.kernel_threads import set_kernel_threads
from fastdeploy_sd.worker.kv_identity import KvIdentity
from fastdeploy_sd.worker.kv_memory import KvMemory, allocate_kv
from fastdeploy_sd.worker.kv_pages import KvPages
from fastdeploy_sd.worker.layer_signals import LayerSignals
from fastdeploy_sd.worker.lead import GroupLead
from fastdeploy_sd.worker.linear_tuning import tune_linear
from fastdeploy_sd.worker.model_loading import load_model
from fastdeploy_sd.worker.prefetch import MEASURED_BYTES
from fastdeploy_sd.worker.rank_group import RankGroup
from fastdeploy_sd.worker.request_table import RequestTable
from fastdeploy_sd.worker.rotary import make_rotary
from fastdeploy_sd.worker.runner import ModelRunner
from fastdeploy_sd.worker.speed_limits import SpeedLimits
from fastdeploy_sd.worker.swap import open_block_store

if TYPE_CHECKING:
    from paddle import Tensor

_log = logging.getLogger(__name__)


class LocalExecutor:
    """The model in this process; see engine.executor.Executor.

    Attributes:
        kv_pages: the KV cache as bytes; of several ranks where the configuration has use for that, else of this one.
        kv_identity: what KV it is.
        layer_signals: of the steps, on a prefill instance only.
        grammars: what compiles for the requests, if anything does.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model_info: ModelInfo,
        kv_pages: KvPages,
        kv_identity: KvIdentity,
        store: BlockCopier | None = None,
        layer_signals: LayerSignals | None = None,
    ) -> None:
        self._runner: ModelRunner | None = runner
        self._store = store
        self.grammars: GrammarStore | None = None
        self.kv_pages, self.kv_identity, self.layer_signals = kv_pages, kv_identity, layer_signals
        self._model_info = model_info

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def block_store(self) -> BlockCopier | None:
        return self._store

    def execute(self, plan: SchedulerOutput) -> StepResult:
        assert self._runner is not None, "execute() after shutdown()"
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        if self._store is not None:
            self._store.close()  # it reads the blocks
        if self.grammars is not None:
            self.grammars.close()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        if self.layer_signals is not None:
            self.layer_signals.close()


def create_executor(
    config: Config,
    make_proposer: MakeProposer = create_proposer,
    group: RankGroup | None = None,
    board: StepBoard | None = None,
) -> LocalExecutor:
    """Load the configured model and allocate its KV cache.

    Args:
        make_proposer: makes what drafts; the tests have others than the configured method.
        group: the ranks that this process is the first of; None = it is alone.
        board: what a drafting method that chooses is told; None = nothing but what steps take.

    Raises:
        CheckpointError: the checkpoint or its draft layers are missing, malformed or of an unsupported architecture.
        ConfigError: an option contradicts the checkpoint, or what it asks for cannot be made: the drafting method, the
            Paddle operators of eager execution.
    """
    start = time.perf_counter()
    group = group or RankGroup()
    set_kernel_threads(config, group)
    # Before memory fills. Ranks share the memory's bandwidth, of which one alone would measure all.
    limits = SpeedLimits.measure(config) if group.size == 1 and _log.isEnabledFor(logging.INFO) else None
    loaded = _load(config, group)
    s, table = config.speculative, loaded.table
    lead = None if group.others is None else GroupLead(group.others, group.collectives)
    agree, over_ranks = (lambda: None, lambda method: method) if lead is None else (lead.agree, lead.over_ranks)
    board = board or StepBoard()
    grammars = open_grammars(config, loaded.vocab_size, loaded.eos_token_ids)
    guided = GuidedRows(grammars, loaded.memory, config.scheduler.max_num_seqs)
    partial_methods = (ForcedTokens(guided),)
    context = replace(loaded.proposer_context(agree, over_ranks), board=board, partial_methods=partial_methods)
    proposer = make_proposer(s, context)
    rule = VerifyRule(s.verify_strategy, s.accept_policy, s.max_candidate_len, s.verify_window)
    info = ModelInfo(
        name=config.model.served_name,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        block_size=loaded.kv.format.block_size,
        num_blocks=loaded.kv.size.num_blocks,
        speculation=SpeculationInfo(
            s.method,
            available_methods(s),
            max_draft_tokens=s.num_speculative_tokens,
            num_lookahead_slots=proposer.num_lookahead_slots,
            lossy=rule.is_lossy,
            has_draft_logprobs=s.enable_draft_logprob and context.draft_model is not None,
        ),
        fingerprint=loaded.kv_identity.output_fingerprint(rule),
    )
    runner = ModelRunner(
        loaded.forward, loaded.memory, table, proposer, info.speculation, rule, board, guided, lead, loaded.signals
    )
    pages = KvPages(loaded.kv.ranks)
    store = open_block_store(config, pages, loaded.kv_identity, loaded.checkpoint, loaded.draft_weights)
    if limits is not None:
        _log.info("%s", limits.describe(loaded.checkpoint))
    _log_loaded(config, loaded, info, time.perf_counter() - start)
    executor = LocalExecutor(runner, info, pages, loaded.kv_identity, store, loaded.signals)
    executor.grammars = grammars
    return executor


def create_follower(config: Config, group: RankGroup) -> ModelFollower:
    """Load what another rank than 0 has of the configured model.

    Raises:
        CheckpointError, ConfigError: as `create_executor`.
    """
    start = time.perf_counter()
    set_kernel_threads(config, group)
    loaded = _load(config, group)
    context = loaded.proposer_context(group.agree)
    method = None if context.draft_model is None else create_layers_method(config.speculative, context)
    seconds, weight_gb = time.perf_counter() - start, loaded.weight_bytes / 1e9
    _log.info("loaded weights of %.2f GB in %.1f s, %d threads", weight_gb, seconds, library.num_threads())
    return ModelFollower(loaded.forward, loaded.memory, loaded.table, method)


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What every rank has, whatever it does with it."""

    checkpoint: Checkpoint
    draft_weights: MtpWeights | None
    kv: KvMemory
    kv_identity: KvIdentity
    draft: DraftLayers | None
    kept_hidden: Sequence[KeptRows[Tensor]]
    forward: Forward
    memory: StepMemory
    table: RequestTable
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    enforce_eager: bool
    signals: LayerSignals | None

    def proposer_context(
        self, agree: Callable[[], None], over_ranks: Callable[[Proposer], Proposer] = lambda method: method
    ) -> ProposerContext:
        """Return what drafting methods are made for; see ProposerContext and DraftModel."""
        draft_model = None
        if self.draft is not None:
            draft_model = DraftModel(
                self.draft.model,
                self.kv.own.draft_caches,
                make_rotary(self.draft.config, self.kv.max_tokens),
                self.kept_hidden,
                self.forward.hidden,
                self.table.tokens,
                self.table.blocks,
                self.enforce_eager,
                agree,
            )
        num_rows = self.memory.limits.num_requests
        return ProposerContext(num_rows, self.kv.max_tokens, self.vocab_size, draft_model, over_ranks=over_ranks)


def _load(config: Config, group: RankGroup) -> _Loaded:
    if config.model.enforce_eager:
        load_operators()
    checkpoint = Checkpoint(config.model.path)
    decoder_config = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    max_model_len = kv_sizing.max_model_len(config, decoder_config)
    eos_token_ids = producible_eos("checkpoint", read_eos_token_ids(checkpoint), decoder_config.vocab_size)
    # Opened first: that there are none must not be found out after the target was packed.
    draft_weights = open_draft_weights(config, checkpoint, decoder_config)
    tp = TpGroup(group.communicator)
    model = load_model(config, checkpoint, decoder_config, draft_weights, tp)
    _tune_linear(config, group, model.weight_bytes)
    kv = allocate_kv(config, decoder_config, model.draft, max_model_len, group)
    s, max_num_seqs, vocab_size = config.speculative, config.scheduler.max_num_seqs, decoder_config.vocab_size
    limits = StepLimits(max_num_seqs, config.scheduler.max_num_batched_tokens, s.num_speculative_tokens)
    memory = StepMemory(limits, vocab_size)
    table = RequestTable(max_num_seqs, kv.max_tokens, kv.format.block_size, vocab_size)
    forward_type = EagerForward if config.model.enforce_eager else RecordedForward
    rotary = make_rotary(decoder_config, kv.max_tokens)
    sends_layers = config.splitwise.splitwise_role == "prefill" and group.rank == 0
    signals = LayerSignals(group.size) if sends_layers else None
    on_stored = None if signals is None else signals.on_stored
    block_size, num_drafts = kv.format.block_size, s.num_speculative_tokens
    kept_hidden = allocate_kept_hidden(kv.own.block_hidden, block_size, max_num_seqs, num_drafts)
    on_hidden = keeping(kept_hidden[0]) if kept_hidden else None
    forward = forward_type(model.decoder, kv.own.caches, rotary, memory, table.blocks, on_stored, on_hidden)
    draft_source = None if draft_weights is None else draft_weights.checkpoint
    identity = KvIdentity.of(config, decoder_config, kv.format.kv_dtype, checkpoint, draft_source)
    return _Loaded(
        checkpoint, draft_weights, kv, identity, model.draft, kept_hidden, forward, memory, table, vocab_size,
        max_model_len, eos_token_ids, model.weight_bytes, config.model.enforce_eager, signals,
    )  # fmt: skip


def _tune_linear(config: Config, group: RankGroup, weight_bytes: int) -> None:
    scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
    formats = sorted({scheme.linear, scheme.experts, scheme.lm_head})
    is_worth = weight_bytes > MEASURED_BYTES
    tune_linear(formats, machine_key(config), measurements_folder(config), group, is_worth=is_worth)


def _log_loaded(config: Config, loaded: _Loaded, info: ModelInfo, seconds: float) -> None:
    size = loaded.kv.size
    _log.info("KV cache: %s", size.describe(info.max_request_tokens))
    if info.max_request_tokens < info.max_model_len:
        needed = -(-info.max_model_len // size.block_size) * size.block_bytes
        _log.info(
            "the KV cache limits requests to %d tokens; the model's %d take kv_cache_memory_gb %.3f",
            info.max_request_tokens, info.max_model_len, needed / 2**30,
        )  # fmt: skip
    _log.info(
        "loaded %s in %.1f s: %s weights of %.2f GB, %d tokens of %s KV cache, requests of up to %d tokens, %s,"
        " %s kernels on %d threads",
        config.model.path, seconds, config.model.quantization or config.model.dtype, loaded.weight_bytes / 1e9,
        size.num_tokens, loaded.kv.format.kv_dtype, info.max_request_tokens, _drafting(info.speculation),
        library.level_text(), library.num_threads(),
    )  # fmt: skip


def _drafting(speculation: SpeculationInfo) -> str:
    if speculation.max_draft_tokens == 0:
        return "no drafting"
    return f"{speculation.max_draft_tokens} drafts by {speculation.method}"
