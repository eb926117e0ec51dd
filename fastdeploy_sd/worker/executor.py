"""LocalExecutor: loads a checkpoint and runs it in this process. Importing this module imports Paddle."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

import fastdeploy_sd.worker.loading.framework  # noqa: F401 (before anything that imports Paddle)
from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.engine.interfaces.executor import AdapterReader, WatchPrompts
from fastdeploy_sd.engine.interfaces.spread_experts import SpreadExperts
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.spec_decode.dispatcher import available_methods, create_method, create_proposer
from fastdeploy_sd.spec_decode.proposer import MakeProposer, keep_local
from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.text.guidance.compiler import GrammarStore
from fastdeploy_sd.text.guidance.vocabulary import VocabularyError, load_vocabulary
from fastdeploy_sd.types import ModelInfo, SchedulerOutput, SpeculationInfo, StepResult
from fastdeploy_sd.types.kv_groups import most_blocks
from fastdeploy_sd.worker.autotune.speed_limits import bytes_per_step, describe_engines, describe_limits, measure_limits
from fastdeploy_sd.worker.kv.block_copier import BlockCopier
from fastdeploy_sd.worker.kv.kv_access import AnyPages, open_pages
from fastdeploy_sd.worker.kv.kv_identity import KvIdentity
from fastdeploy_sd.worker.kv.swap import open_block_store
from fastdeploy_sd.worker.loading.device_choice import choose_device, set_kernel_threads
from fastdeploy_sd.worker.loading.loaded import Loaded, load
from fastdeploy_sd.worker.loading.loading_errors import loading
from fastdeploy_sd.worker.ranks.coordinator import (
    ExpertRanks,
    GroupCoordinator,
    RankCoordinator,
    SingleRank,
    group_ended_as_error,
)
from fastdeploy_sd.worker.ranks.expert_ranks import close_experts, leave_experts, with_experts
from fastdeploy_sd.worker.ranks.gpu_ranks import leave_gpus, with_gpus
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from fastdeploy_sd.worker.ranks.rank_worker import RankWorker
from fastdeploy_sd.worker.step.drafting import Drafting
from fastdeploy_sd.worker.step.forced_tokens import ForcedTokens
from fastdeploy_sd.worker.step.guided_rows import GuidedRows
from fastdeploy_sd.worker.step.layer_signals import LayerSignals
from fastdeploy_sd.worker.step.runner import ModelRunner
from fastdeploy_sd.worker.step.step_launcher import StepLauncher

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class LocalExecutor:
    """The model in this process; see interfaces.executor.Executor.

    Attributes:
        kv_pages: the KV cache as bytes; of all ranks where the configuration needs it, else of this one.
        layer_signals: on a prefill instance only.
        launcher: of in-flight steps; None = only `execute`.
        expert_monitor: see ServingExecutor; set by who starts all ranks.
        adapters: see AdaptingExecutor.
    """

    _runner: ModelRunner | None
    model_info: ModelInfo
    kv_pages: AnyPages
    kv_identity: KvIdentity
    block_store: BlockCopier | None = None
    layer_signals: LayerSignals | None = None
    grammars: GrammarStore | None = None
    launcher: StepLauncher | None = None
    group: RankGroup = field(default_factory=RankGroup)
    expert_monitor: SpreadExperts | None = None
    adapters: AdapterReader | None = None

    def execute(self, plan: SchedulerOutput) -> StepResult:
        assert self._runner is not None, "execute() after shutdown()"
        with group_ended_as_error():
            return self._runner.execute(plan)

    def watch_prompts(self, watch: WatchPrompts | None) -> None:
        """Let `watch` see the logits of prompts whose log-probabilities are asked for; None = nothing does."""
        assert self._runner is not None, "watch_prompts() after shutdown()"
        self._runner.prompts.watch = watch

    @property
    def experts(self) -> ExpertService | None:
        """The service of this rank's experts, where they are spread."""
        return self.group.experts

    def begin_drain(self) -> None:
        """See ServingExecutor."""
        if self.experts is not None:
            first = self.experts.rank - self.group.rank
            self.experts.begin_drain(range(first, first + self.group.size))

    def leave(self, timeout_s: float) -> None:
        """See ServingExecutor."""
        if self.experts is not None:
            leave_experts(self.experts, timeout_s)

    def shutdown(self) -> None:
        if self.block_store is not None:
            self.block_store.close()  # it reads the blocks
        if self.grammars is not None:
            self.grammars.close()
        if self.launcher is not None:
            self.launcher.close()  # an engine may keep it longer
        if self._runner is not None:
            self._runner.close()
        self._runner = self.launcher = None
        if self.layer_signals is not None:
            self.layer_signals.close()
        self.kv_pages.close()  # before the ranks end whose KV is in it
        leave_gpus(self.group)
        close_experts(self.group)


@loading()
def create_executor(
    config: Config,
    make_proposer: MakeProposer = create_proposer,
    group: RankGroup | None = None,
    step_stats: StepStats | None = None,
) -> LocalExecutor:
    """Load the configured model and allocate its KV cache.

    `group`: the ranks that this process is the first of; None = it is alone.

    Raises:
        CheckpointError: the checkpoint or its draft layers are missing, malformed or of an unsupported architecture.
        ConfigError: an option contradicts the checkpoint, or what it asks for cannot be made: the drafting method, the
            Paddle operators of eager execution. Or the device has no memory for the model, or its steps.
        InternalError: the device was lost.
    """
    start = time.perf_counter()
    group = group or RankGroup()
    set_kernel_threads(config, group)
    choose_device(config)
    group = with_gpus(config, with_experts(config, group))
    try:
        return _created(config, make_proposer, group, step_stats or StepStats(), start)
    except BaseException:
        leave_gpus(group)  # the process may load another model
        close_experts(group)
        raise


def _created(
    config: Config, make_proposer: MakeProposer, group: RankGroup, step_stats: StepStats, start: float
) -> LocalExecutor:
    is_host = device().kind == "cpu"
    # Before memory fills. Ranks share the memory's bandwidth; one rank alone would measure all of it.
    is_measured = is_host and group.size == 1 and _log.isEnabledFor(logging.INFO)
    limits = measure_limits(config) if is_measured else None
    loaded = load(config, group)
    drafts = [weights for weights in loaded.draft_weights.values() if weights.reads]  # whose KV goes with the target's
    kernels = None if is_host else f"CUDA, {device().text}"
    identity = KvIdentity.of(
        config,
        loaded.config,
        loaded.kv.format.kv_dtype,
        loaded.checkpoint,
        [weights.checkpoint for weights in drafts],
        kernels,
    )
    ranks = None if group.others is None else GroupCoordinator(group.others, group.collectives)
    agree, over_ranks = (lambda: None, keep_local) if ranks is None else (ranks.agree, ranks.over_ranks)
    grammars = open_grammars(config, loaded.vocab_size, loaded.eos_token_ids)
    guided = GuidedRows(grammars, loaded.step.memory, config.scheduler.max_num_seqs)
    context = replace(
        loaded.proposer_context(agree, over_ranks), step_stats=step_stats, per_request_methods=(ForcedTokens(guided),)
    )
    proposer, s = make_proposer(config.speculative, context), config.speculative
    rule = VerifyRule(s.verify_strategy, s.accept_policy, s.max_candidate_len, s.verify_window)
    speculation = SpeculationInfo(
        s.method,
        available_methods(s),
        max_draft_tokens=s.num_speculative_tokens,
        num_lookahead_slots=proposer.num_lookahead_slots,
        lossy=rule.is_lossy,
        has_draft_logprobs=s.enable_draft_logprob and bool(context.draft_models),
    )
    info = ModelInfo(
        name=config.model.served_name,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        block_size=loaded.kv.format.block_size,
        num_blocks=loaded.kv.size.num_blocks,
        kv_groups=loaded.kv.size.groups,
        speculation=speculation,
        fingerprint=identity.output_fingerprint(rule),
        weight_bytes=bytes_per_step(config, loaded.checkpoint) // group.size,
        kv_token_bytes=loaded.kv.size.token_bytes,
        num_state_snapshots=loaded.states[0].size.num_snapshots if loaded.states else None,
        hidden_size=loaded.config.hidden_size,
        num_adapter_slots=config.lora.num_slots,
    )
    drafting = Drafting(proposer, loaded.step, guided, speculation, step_stats, is_lossy=rule.is_lossy)
    coordinator: RankCoordinator = ranks or SingleRank()
    if group.experts is not None:
        coordinator = ExpertRanks(coordinator, group.experts)
    runner = ModelRunner(loaded.step, drafting, rule, guided, coordinator)
    pages = open_pages(config, loaded.kv.ranks, loaded.states)
    store = open_block_store(config, pages, loaded.states, identity, loaded.checkpoint, drafts)
    if limits is not None:
        _log.info("%s", describe_limits(limits, bytes_per_step(config, loaded.checkpoint)))
        if config.parallel.engines_per_host > 1 and not config.parallel.expert_rank(0):
            _log.info("%s", describe_engines(limits, config.parallel.engines_per_host))
    _log_loaded(config, loaded, info, time.perf_counter() - start)
    is_alone = ranks is None and config.splitwise.splitwise_role != "prefill"  # else more follows a step's result
    is_async = not is_host and is_alone and config.scheduler.async_scheduling
    launcher = StepLauncher(runner, loaded.step.table) if is_async else None
    signals, adapters = loaded.step.signals, loaded.step.adapters
    return LocalExecutor(runner, info, pages, identity, store, signals, grammars, launcher, group, adapters=adapters)


@loading()
def create_rank_worker(config: Config, group: RankGroup) -> RankWorker:
    """Load the part of the configured model that a rank other than 0 has.

    Raises CheckpointError, ConfigError, InternalError: as `create_executor`.
    """
    start = time.perf_counter()
    set_kernel_threads(config, group)
    choose_device(config, group.rank)
    group = with_gpus(config, with_experts(config, group))
    loaded = load(config, group)
    context = loaded.proposer_context(group.agree)
    methods = {name: create_method(name, config.speculative, context) for name in context.draft_models}
    seconds, weight_gb = time.perf_counter() - start, loaded.weight_bytes / 1e9
    _log.info("loaded weights of %.2f GB in %.1f s, %d threads", weight_gb, seconds, library.num_threads())
    return RankWorker(loaded.step, methods, group.collectives, group.experts)


def _log_loaded(config: Config, loaded: Loaded, info: ModelInfo, seconds: float) -> None:
    size, quantization = loaded.kv.size, config.model.quantization
    _log.info("KV cache: %s", size.describe(info.max_request_tokens))
    if loaded.states:
        _log.info("recurrent states: %s", loaded.states[0].size.describe())
    if info.max_request_tokens < info.max_model_len:
        needed = most_blocks(size.groups, info.max_model_len) * size.block_bytes
        _log.info(
            "the KV cache limits requests to %d tokens; the model's %d take kv_cache_memory_gb %.3f",
            info.max_request_tokens, info.max_model_len, needed / 2**30,
        )  # fmt: skip
    _log.info(
        "loaded %s in %.1f s: %sweights of %.2f GB, %d tokens of %s KV cache, requests of up to %d tokens, %s,"
        " %s",
        config.model.path, seconds, f"{quantization} " if quantization else "", loaded.weight_bytes / 1e9,
        size.num_tokens, loaded.kv.format.kv_dtype, info.max_request_tokens, _drafting(info.speculation),
        _kernels(),
    )  # fmt: skip


def _kernels() -> str:
    found = device()
    if isinstance(found, CudaDevice):
        return f"CUDA kernels on {found.library.text}"
    return f"{library.level_text()} kernels on {library.num_threads()} threads"


def _drafting(speculation: SpeculationInfo) -> str:
    if speculation.max_draft_tokens == 0:
        return "no drafting"
    return f"{speculation.max_draft_tokens} drafts by {speculation.method}"


def open_grammars(config: Config, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarStore | None:
    """Return the store of a model's grammars; None, with a line in the log, where its vocabulary allows none."""
    model = config.model
    try:
        vocabulary = load_vocabulary(model.tokenizer_path, model.tokenizer_backend, vocab_size, eos_token_ids)
    except VocabularyError as error:
        _log.warning("%s; requests for it are refused", error.message)
        return None
    return GrammarStore(vocabulary, max_used=2 * config.scheduler.max_num_seqs)
