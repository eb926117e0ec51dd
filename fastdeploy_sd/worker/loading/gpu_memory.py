"""The GPU memory that a server takes without its KV, and the memory left for KV. Needs no Paddle and loads nothing.

Sizes of steps are upper bounds from the options; the library reports the workspaces of kernels. It is an estimate: the
part that `gpu_memory_utilization` leaves free covers its error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.sizes import sizes_up_to
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.program.declaration import DTYPE_CODES
from fastdeploy_sd.device.step_memory import StepLimits, max_prompt_rows
from fastdeploy_sd.models.attention_config import AnyMixer, AttentionConfig, GatedDeltaConfig, LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig, MoeConfig
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM, DraftWeights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.linear_format import format_code
from fastdeploy_sd.worker.kv.kv_sizing import KvRoom

_GIB = 1 << 30
# For graphs, which are made while a server runs, and the driver's own memory.
_GRAPH_BYTES = 256 << 20
_GRAPH_SHARE = 1 / 64
# Staging of what steps send, and of KV blocks that go to the host or come from it.
_STAGING_BYTES = 4 << 20
_COPY_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory at one moment, in bytes.

    Attributes:
        total, free: of the GPU.
        steps: what the server will still take besides its KV.
    """

    total: int
    free: int
    steps: int

    def room(self, utilization: float) -> int:
        """Return the bytes left for KV when this share of the whole is used; may be negative."""
        return self.free - self.steps - int((1 - utilization) * self.total)


def room_for_kv(config: Config, memory: GpuMemory, num_bytes: int, num_ranks: int = 1) -> KvRoom:
    """Return the room for the KV of all ranks on their GPUs, and why.

    Args:
        memory: of this rank's GPU.
        num_bytes: the least that any rank has left.
    """
    share = config.cache.gpu_memory_utilization
    used = memory.total - memory.free
    each = f" on each of {num_ranks} GPUs" if num_ranks > 1 else ""
    reason = (
        f"gpu_memory_utilization {share:g} of {memory.total / _GIB:.2f} GiB, of which {used / _GIB:.2f} are taken and"
        f" {memory.steps / _GIB:.2f} are for steps{each}"
    )
    return KvRoom(max(num_bytes, 0) * num_ranks, reason, "gpu_memory_utilization", takes_all=True)


def step_bytes(
    config: Config, decoder: DecoderConfig, drafts: Sequence[DraftWeights], max_tokens: int, library: CudaLibrary
) -> int:
    """Return the bytes that steps take: activations, tables of requests, workspaces of kernels, and graphs.

    Args:
        drafts: of the draft models.
        max_tokens: of a sequence.
    """
    s, max_num_seqs = config.speculative, config.scheduler.max_num_seqs
    limits = StepLimits(max_num_seqs, config.scheduler.max_num_batched_tokens, s.num_speculative_tokens)
    item = storage(config.model.dtype).itemsize
    num_tokens, num_logits = limits.num_tokens, limits.num_logits
    total = _pass_bytes(decoder, num_tokens, num_logits, item) + _workspace_bytes(
        library, config, decoder, num_tokens, num_logits, max_tokens
    )
    of_prompts = max_prompt_rows(num_tokens, decoder.vocab_size)
    total += of_prompts * (decoder.hidden_size * item + decoder.vocab_size * 4)
    for draft in drafts:
        num_rows = num_tokens + max_num_seqs * (s.num_speculative_tokens + s.num_model_steps)
        layer = replace(draft.config, vocab_size=decoder.vocab_size)
        keeps_logits = draft.drafts_at_once or s.model_top_k > 1
        num_draft_rows = max_num_seqs * (s.num_model_steps if keeps_logits else 1)
        total += _pass_bytes(layer, num_rows, num_draft_rows, item) + num_rows * 2 * layer.hidden_size * item
        # Rows that are read of layers of the target, apart and side by side.
        total += num_tokens * 2 * sum(row != FINAL_NORM for row in draft.reads) * decoder.hidden_size * item
        total += 2 * _workspace_bytes(library, config, layer, num_rows, max_num_seqs, max_tokens)
    table = max_num_seqs * (max_tokens * 4 + decoder.vocab_size * 4 + 4096)
    masks = num_logits * (decoder.vocab_size // 8 + 4096)
    ropes = [rope for model in (decoder, *(draft.config for draft in drafts)) for rope in model.ropes]
    # A row of a table, and a factor of queries.
    rotary = max_tokens * 4 * sum(2 if rope is None else rope.rotary_dim + 1 for rope in ropes)
    # What rows with adapters become between their matrices: of q, k, v and z, also as the sum over ranks.
    of_adapters = num_tokens * 2 * 4 * config.lora.max_rank * 4 if config.lora.num_slots else 0
    staging = _STAGING_BYTES + _COPY_BYTES * config.copies_kv
    total_memory, _ = library.memory_bytes()
    return total + table + masks + rotary + of_adapters + staging + int(min(_GRAPH_BYTES, total_memory * _GRAPH_SHARE))


def _pass_bytes(config: DecoderConfig, num_tokens: int, num_logits: int, item: int) -> int:
    """Return the bytes of simultaneous activations, and of the logits."""
    widest = max(
        (max(3 * _inner_size(layer), _attention_width(layer.attention)) for layer in config.layers),
        default=0,
    )
    per_token = config.hidden_size * (4 + 3 * item) + widest * item
    return num_tokens * per_token + num_logits * (config.hidden_size * item + config.vocab_size * 4)


def _attention_width(attention: AnyMixer) -> int:
    """Return the elements of a token's simultaneous activations."""
    if isinstance(attention, GatedDeltaConfig):
        return 2 * (attention.key_size + attention.value_size + attention.num_value_heads) + attention.value_size
    if isinstance(attention, LatentAttentionConfig):
        # Heads as projected, to be rotated and rotated, what attention makes of them, and values.
        return attention.num_heads * (attention.query_dim + 3 * attention.head_dim + attention.value_dim)
    return attention.qkv_size + (2 + attention.output_gate) * attention.q_size


def _projections(attention: AnyMixer, hidden: int) -> list[tuple[int, int]]:
    """Return (K, N) of the linear layers."""
    found = [(attention.q_size, hidden)]
    if isinstance(attention, GatedDeltaConfig):
        return [*found, (hidden, 2 * (attention.key_size + attention.value_size))]
    if isinstance(attention, LatentAttentionConfig):
        read = attention.query_latent_dim or hidden
        return [*found, (read, attention.num_heads * attention.query_dim), (hidden, read), (hidden, attention.head_dim)]
    return [*found, (hidden, attention.qkv_size)]


def _inner_size(layer: LayerConfig) -> int:
    """Return the inner size of the feed-forward network that every token goes through."""
    mlp = layer.mlp
    return mlp.intermediate_size if isinstance(mlp, DenseConfig) else mlp.shared_intermediate_size


def _workspace_bytes(
    library: CudaLibrary, config: Config, decoder: DecoderConfig, num_tokens: int, num_logits: int, max_tokens: int
) -> int:
    """Return the largest workspace of any call, at any size of a step: some calls need most for few rows."""
    wanted = [_expert_bytes(config, decoder, num_tokens)]
    for size in sizes_up_to(num_tokens):
        calls = _calls(config, decoder, min(size, num_tokens), min(size, num_logits), max_tokens)
        wanted += [library.number(f"{op}_workspace_bytes", ctypes.byref(params)) for op, params in calls]
    return max(wanted)


def _calls(
    config: Config, decoder: DecoderConfig, num_tokens: int, num_logits: int, max_tokens: int
) -> Iterator[tuple[str, Any]]:
    dtype, max_num_seqs = DTYPE_CODES[config.model.dtype], config.scheduler.max_num_seqs
    scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
    hidden, layers = decoder.hidden_size, dict.fromkeys(decoder.layers)
    shapes = [(num_logits, hidden, decoder.vocab_size, scheme.lm_head)]
    for layer in layers:
        shapes += [(num_tokens, *shape, scheme.linear) for shape in _projections(layer.attention, hidden)]
        shapes.append((num_tokens, _inner_size(layer) or hidden, hidden, scheme.linear))
    for rows, inputs, outputs, fmt in shapes:
        params = struct_type("LinearParams")()
        params.num_rows, params.in_features, params.out_features = rows, inputs, outputs
        params.format, params.num_slices, params.slice_unit = format_code(fmt), 1, 1
        params.x_dtype = params.y_dtype = dtype
        yield "linear", params
    for attention in dict.fromkeys(decoder.attentions):
        params = struct_type("CascadeAppendAttentionParams")()
        params.num_blocks, params.num_kv_heads, params.head_dim = 1, attention.num_kv_heads, attention.head_dim
        params.block_size, params.dtype, params.kv_dtype = config.cache.block_size, dtype, dtype
        params.num_requests, params.num_table_rows = min(num_tokens, max_num_seqs), max_num_seqs
        params.num_tokens, params.num_heads = num_tokens, attention.num_heads
        params.max_blocks = -(-max_tokens // config.cache.block_size)
        params.group_rows = 1  # any address: requests may share prefixes
        params.v = int(isinstance(attention, AttentionConfig))  # likewise: there are values
        yield "cascade_append_attention", params
        if isinstance(attention, LatentAttentionConfig):
            for inputs, outputs in (
                (attention.key_dim, attention.latent_dim),
                (attention.latent_dim, attention.value_dim),
            ):
                params = struct_type("HeadLinearParams")()
                params.num_tokens, params.num_heads, params.num_rest = num_tokens, attention.num_heads, 0
                params.in_features, params.out_features, params.dtype = inputs, outputs, dtype
                params.format = format_code(scheme.dtype)
                yield "head_linear", params


def _expert_bytes(config: Config, decoder: DecoderConfig, num_tokens: int) -> int:
    """Return the bytes for the pairs of tokens and experts that are computed together."""
    item, hidden = storage(config.model.dtype).itemsize, decoder.hidden_size
    experts = {layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoeConfig)}
    rows = [moe.top_k * (3 * moe.intermediate_size * item + hidden * (4 + 2 * item)) for moe in experts]
    return min(num_tokens, 2048) * max(rows, default=0)
