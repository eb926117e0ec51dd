"""The loaded part of a configured model on any rank. Importing this module imports Paddle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastdeploy_sd.worker.loading.framework  # noqa: F401 (before anything that imports Paddle)
from fastdeploy_sd.config import Config
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import HOST_BUFFERS
from fastdeploy_sd.device.program import paddle_ops
from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.adapters import Adapters
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import DraftModel, DraftWeights
from fastdeploy_sd.models.layers.linear import ExpertGroup, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.mtp_batch import HiddenStateBuffer
from fastdeploy_sd.ops.operators import declared_ops
from fastdeploy_sd.rules.requests import producible_eos
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.spec_decode.proposer import OverRanks, ProposerContext, keep_local
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.autotune.kept_measurements import machine_key, measurements_folder
from fastdeploy_sd.worker.autotune.linear_tuning import MEASURED_BYTES, tune_linear
from fastdeploy_sd.worker.kv import kv_sizing
from fastdeploy_sd.worker.kv.kv_memory import KvMemory, Zeros, allocate_kv, room_for_kv
from fastdeploy_sd.worker.kv.state_memory import StateMemory, layer_memories
from fastdeploy_sd.worker.kv.state_sizing import StateSize, state_bytes, state_size, verify_state_options
from fastdeploy_sd.worker.loading.draft_weights import draft_scheme, open_draft_weights
from fastdeploy_sd.worker.loading.free_memory import free_memory
from fastdeploy_sd.worker.loading.loading_errors import asking_for_memory
from fastdeploy_sd.worker.loading.model_loading import load_model
from fastdeploy_sd.worker.loading.rotary import make_rotary
from fastdeploy_sd.worker.ranks.expert_mover import ExpertMover
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from fastdeploy_sd.worker.step.adapter_rows import AdapterRows
from fastdeploy_sd.worker.step.forward import (
    EagerForward,
    Forward,
    ForwardPass,
    KnownTokens,
    RecordedForward,
    StepResources,
)
from fastdeploy_sd.worker.step.hidden_reader import HiddenReader, allocate_kept_hidden
from fastdeploy_sd.worker.step.layer_signals import LayerSignals
from fastdeploy_sd.worker.step.path_compaction import PathCompaction
from fastdeploy_sd.worker.step.prompt_rows import PromptRows, RowLogits
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.step_buffers import StepBuffers

if TYPE_CHECKING:
    from paddle import Tensor

_STEP_COLUMNS = (
    "table_rows", "query_start_loc", "num_computed", "num_new", "cu_num_logits", "cu_num_output", "num_committed",
    "max_draft_len", "made_drafts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The loaded model on any rank, 0 or other.

    Attributes:
        states: of the layers with recurrent states, of the ranks of `kv`; () = there are none.
        draft_weights, drafts, kept_hidden: of the draft models, by method.
        draft_rows: [T, H] of every draft model that reads hidden rows: those of the step, for the largest step.
        is_async: whether steps may begin after in-flight ones.
        has_whole_drafts: whether rank 0 alone has the draft models, whole.
    """

    checkpoint: ModelSource
    draft_weights: Mapping[str, DraftWeights]
    config: DecoderConfig
    kv: KvMemory
    states: Sequence[StateMemory]
    drafts: Mapping[str, DraftModel]
    kept_hidden: Mapping[str, Sequence[HiddenStateBuffer[Tensor]]]
    draft_rows: Mapping[str, Tensor]
    step: StepResources
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    enforce_eager: bool
    is_async: bool
    has_whole_drafts: bool

    def proposer_context(self, agree: Callable[[], None], over_ranks: OverRanks = keep_local) -> ProposerContext:
        """Return the context of drafting methods; see ProposerContext and LoadedDraftModel."""
        if self.has_whole_drafts:  # no other rank takes part
            agree, over_ranks = lambda: None, keep_local
        models = {name: self._draft_model(name, model, agree) for name, model in self.drafts.items()}
        num_rows = self.step.memory.limits.num_requests
        return ProposerContext(num_rows, self.kv.max_tokens, self.vocab_size, models, over_ranks=over_ranks)

    def _draft_model(self, name: str, model: DraftModel, agree: Callable[[], None]) -> LoadedDraftModel:
        kept, config = self.kept_hidden[name], self.draft_weights[name].config
        caches, table = self.kv.own.caches_of(name), self.step.table
        hidden = self.draft_rows.get(name, self.step.forward.hidden)
        max_model_len, dtype = self.max_model_len, self.kv.format.row_storage
        if not METHODS[name].reads_hidden:
            max_model_len = min(max_model_len, config.max_position)
            hidden = device().zeros((hidden.shape[0], 0), dtype)
        if not kept:  # no row outlives its step
            counts = len(caches) and caches[0].num_blocks, len(table.tokens)
            blocks, requests = (device().zeros((count, hidden.shape[1]), dtype) for count in counts)
            kept = [HiddenStateBuffer(blocks, requests, self.kv.format.block_size, num_kept=1)]
        return LoadedDraftModel(
            method=METHODS[name],
            model=model,
            caches=caches,
            block_size=self.kv.format.block_size,
            rotary=make_rotary(config, self.kv.max_tokens, max_model_len),
            kept_hidden=kept,
            hidden=hidden,
            token_table=self.step.buffers.of(table.tokens),
            block_table=self.step.buffers.of(table.blocks),
            host_blocks=table.blocks,
            max_position=config.max_position,
            vocab_size=config.vocab_size,
            enforce_eager=self.enforce_eager,
            agree=agree,
            step=self._step_columns(),
        )

    def _step_columns(self) -> Mapping[str, Any] | None:
        if not self.is_async:
            return None
        arrays = {name: getattr(self.step.memory, name) for name in _STEP_COLUMNS}
        arrays["num_blocks"] = self.step.table.num_blocks
        return {name: self.step.buffers.of(array) for name, array in arrays.items()}


def load(config: Config, group: RankGroup) -> Loaded:
    """Load this rank's part of the configured model into the chosen device's memory.

    Raises CheckpointError, ConfigError: as `worker.executor.create_executor`.
    """
    if config.model.enforce_eager:
        load_operators()
    checkpoint = Checkpoint(config.model.path)
    decoder_config = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    verify_state_options(config, decoder_config)
    max_model_len = kv_sizing.max_model_len(config, decoder_config)
    eos_token_ids = producible_eos("checkpoint", checkpoint.eos_token_ids(), decoder_config.vocab_size)
    # Opened first: an error about missing ones must come before the target is packed.
    draft_weights = open_draft_weights(config, checkpoint, decoder_config)
    eplb = config.parallel.eplb
    num_redundant = None if eplb is None else eplb.redundant_experts_num
    spread = None if group.experts is None else ExpertGroup(group.experts, num_redundant=num_redundant)
    tp, lora = TpGroup(group.communicator, spread), config.lora
    with asking_for_memory("model, quantization, device", "weights"):
        adapters = Adapters(lora.num_slots, lora.max_rank, config.model.dtype) if lora.num_slots else None
        model = load_model(config, checkpoint, decoder_config, draft_weights, tp, adapters)
    if spread is not None:
        spread.service.start()
        if eplb is not None:
            ExpertMover(spread.service, spread.moves).start()
    is_host = device().kind == "cpu"
    if is_host:
        _tune_linear(config, group, model.weight_bytes, drafts=bool(draft_weights))
    size = _state_size(config, decoder_config, draft_weights, group)
    of_states = state_bytes(config, decoder_config, size, group.size)
    kv = allocate_kv(config, decoder_config, draft_weights, max_model_len, group, of_states)
    states = [] if size is None else _allocate_states(config, decoder_config, size, group, kv.zeros)
    s, max_num_seqs, vocab_size = config.speculative, config.scheduler.max_num_seqs, decoder_config.vocab_size
    limits = StepLimits(max_num_seqs, config.scheduler.max_num_batched_tokens, s.num_speculative_tokens)
    memory = StepMemory(
        limits, vocab_size, None if size is None else size.num_snapshots, has_adapters=adapters is not None
    )
    table = RequestTable(max_num_seqs, kv.max_tokens, kv.format.block_size, vocab_size, len(kv.size.groups))
    buffers = HOST_BUFFERS if is_host else StepBuffers(device(), memory, table)
    rotary = make_rotary(decoder_config, kv.max_tokens, max_model_len)
    # A GPU's pages are sent after the step, so its layers need no signals.
    sends_layers = is_host and config.splitwise.splitwise_role == "prefill" and group.rank == 0
    signals = LayerSignals(group.size) if sends_layers else None
    block_size, num_drafts = kv.format.block_size, s.num_speculative_tokens
    kept_hidden = {
        name: allocate_kept_hidden(kv.own.hidden_of(name), block_size, max_num_seqs, num_drafts)
        for name in kv.own.drafts
    }
    readers = {
        name: HiddenReader(draft_weights[name].reads, model.drafts[name].combine_hidden, kept[0])
        for name, kept in kept_hidden.items()
        if kept
    }
    memories = layer_memories(decoder_config, kv.own.caches, states[0].nets) if states else ()
    forward_pass = ForwardPass(
        model.decoder,
        kv.own.caches,
        rotary,
        None if signals is None else signals.on_stored,
        list(readers.values()),
        memories,
    )
    known = None
    if not is_host and group.size == 1:  # other ranks only follow the first
        known = KnownTokens(table.tokens, table.num_tokens, table.blocks, memory.made_drafts)
    if config.model.enforce_eager:
        forward: Forward = EagerForward(forward_pass, memory, table.group_blocks)
    else:
        forward = RecordedForward(forward_pass, memory, table.group_blocks, buffers, known)
    compact_paths = PathCompaction(forward_pass, forward.draft_rows, memory, table.group_blocks, buffers)
    row_logits = RowLogits(model.decoder, forward.hidden, is_eager=config.model.enforce_eager)
    prompts = PromptRows(row_logits, memory, table, forward.hidden)
    return Loaded(
        checkpoint=checkpoint,
        draft_weights=draft_weights,
        config=decoder_config,
        kv=kv,
        states=states,
        drafts=model.drafts,
        kept_hidden=kept_hidden,
        draft_rows=dict(zip(readers, forward.draft_rows, strict=True)),
        step=StepResources(
            forward,
            compact_paths,
            prompts,
            memory,
            table,
            signals,
            buffers,
            None if adapters is None else AdapterRows(adapters, memory, table, group.others),
        ),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        weight_bytes=model.weight_bytes,
        enforce_eager=config.model.enforce_eager,
        is_async=known is not None,
        has_whole_drafts=config.speculative.draft_tensor_parallel_size == 1,
    )


def _state_size(
    config: Config, decoder_config: DecoderConfig, draft_weights: Mapping[str, DraftWeights], group: RankGroup
) -> StateSize | None:
    """Return the size of the recurrent states, None = there are none; raises ConfigError: the host has no room."""

    def room() -> int:
        return room_for_kv(config, decoder_config, draft_weights, group).num_bytes

    size = state_size(config, decoder_config, room, group.size)
    if size is not None and device().kind == "cpu":
        size.verify_room(group.smallest(free_memory))
    return size


def _allocate_states(
    config: Config, decoder_config: DecoderConfig, size: StateSize, group: RankGroup, zeros: Mapping[int, Zeros]
) -> list[StateMemory]:
    """Allocate this rank's recurrent states, and map those of others; raises ConfigError: as StateMemory.allocate."""
    ranks = [group.rank, *(rank for rank in sorted(zeros) if rank != group.rank)]
    return [
        StateMemory.allocate(config, decoder_config, size, Shard(rank, group.size), zeros.get(rank)) for rank in ranks
    ]


def _tune_linear(config: Config, group: RankGroup, weight_bytes: int, *, drafts: bool) -> None:
    """Tune products of the formats that the target is stored in, and draft layers where there are any."""
    schemes = [QuantScheme.create(config.model.dtype, config.model.quantization)]
    if drafts:
        schemes.append(draft_scheme(config))
    formats = sorted({fmt for scheme in schemes for fmt in (scheme.linear, scheme.experts, scheme.lm_head)})
    is_worth = weight_bytes > MEASURED_BYTES
    tune_linear(formats, machine_key(config), measurements_folder(config), group, is_worth=is_worth)


def load_operators() -> None:
    """Load them. Raises ConfigError: they cannot be built here."""
    try:
        paddle_ops.load(declared_ops())
    except ConfigError as error:
        raise ConfigError(f"enforce_eager: {error.message}", param="enforce_eager") from None
