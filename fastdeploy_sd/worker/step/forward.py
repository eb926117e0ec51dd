"""The model's forward pass over a step: hidden rows of every token, logits of the requested ones.

EagerForward calls the model's Python; it is the definition. RecordedForward runs that Python once, when the model is
loaded, and then replays its ops as one native call per step. Both give the same bits, read a step's memory, and write
their result to fixed places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import HOST_BUFFERS, DeviceBuffers, RowsOnDevice
from fastdeploy_sd.device.program.program import Recording
from fastdeploy_sd.device.program.recorder import Recorder
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM
from fastdeploy_sd.models.layers.attention import AttentionInputs, GroupMaps
from fastdeploy_sd.models.layers.decoder_layer import LayerMemory
from fastdeploy_sd.models.rope_config import RopeConfig
from fastdeploy_sd.ops.batch import gather_output_rows, group_slots, settle_step_
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.delta_memory import DeltaStates
from fastdeploy_sd.ops.kv_cache import KvCache, RequestBlocks, Rotary
from fastdeploy_sd.ops.logprob_rows import logit_rows
from fastdeploy_sd.ops.mtp import keep_hidden_
from fastdeploy_sd.ops.rowwise import cast
from fastdeploy_sd.types import F32, I32
from fastdeploy_sd.worker.step.adapter_rows import AdapterRows
from fastdeploy_sd.worker.step.hidden_reader import HiddenReader
from fastdeploy_sd.worker.step.layer_signals import LayerSignals
from fastdeploy_sd.worker.step.prompt_rows import PromptRows
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.step_inputs import (
    ADAPTER_SHAPES,
    PADDING,
    RESOLVED,
    RESOLVED_SHAPES,
    SHAPES,
    STATE_SHAPES,
    STATES,
    block_table_names,
    input_arrays,
)

OnStored = Callable[[KvCache[Tensor], AttentionInputs], None]


class KnownTokens(NamedTuple):
    """The device's state of the requests when a step begins there; see ops.reference.batch.SettleTables."""

    tokens: Any
    num_tokens: Any
    blocks: Any
    made_drafts: Any


class Forward(Protocol):
    """Runs the step's tokens and stores their KV.

    Attributes:
        hidden: [T, H] after the final norm, in the model's dtype.
        draft_rows: [T, H of the reader] of each reader of the pass, likewise.
        logits: f32[L, V], a row for each of the step's logits_indices.
    """

    hidden: Tensor
    draft_rows: Sequence[Tensor]

    @property
    def logits(self) -> F32 | RowsOnDevice: ...

    def __call__(self) -> None:
        """Run the step that the memory holds."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """The computation of a forward pass, for both ways to run it.

    Attributes:
        caches: of the layers that have one. memories: of every layer; () = they are the caches.
        readers: they get the rows that they read.
    """

    decoder: Decoder
    caches: Sequence[KvCache[Tensor]]
    rotary: Mapping[RopeConfig | None, Rotary[Tensor]]
    on_stored: OnStored | None = None
    readers: Sequence[HiddenReader] = ()
    memories: Sequence[LayerMemory] = ()

    @property
    def num_groups(self) -> int:
        """Return the number of KV groups."""
        return 1 + max(cache.group for cache in self.caches)

    def run(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return hidden rows, logits, and the rows of each reader that has own ones.

        Inputs and results are tensors, or symbolic ones.
        """
        rows, starts, size = inputs["table_rows"], inputs["query_start_loc"], self.caches[0].block_size
        first, *others = (RequestBlocks(rows, inputs[name]) for name in block_table_names(self.num_groups))
        maps = AttentionInputs(
            positions=inputs["positions"],
            slot_mapping=inputs["slot_mapping"],
            query_start_loc=starts,
            seq_lens=inputs["seq_lens"],
            blocks=first,
            rotary=self.rotary,
            on_stored=self.on_stored,
            more_groups=[
                GroupMaps(group_slots(inputs["slot_mapping"], starts, inputs["seq_lens"], blocks, size), blocks)
                for blocks in others
            ],
            tree_mask=inputs.get("tree_mask"),
            adapter_slots=inputs.get("adapter_slots"),
            states=DeltaStates(rows, *(inputs[name] for name in STATES)) if STATES[0] in inputs else None,
        )
        streams: dict[int, Any] = {}
        wanted = {layer for reader in self.readers for layer in reader.reads} - {FINAL_NORM}
        dtype = getattr(paddle, self.decoder.dtype)

        def note(layer: int, stream: Tensor) -> None:
            if layer in wanted:
                streams[layer] = cast(stream, dtype)

        on_stream = note if wanted else None
        hidden = streams[FINAL_NORM] = self.decoder.forward(
            inputs["input_ids"], self.memories or self.caches, maps, on_stream
        )
        rows = [reader.rows_of(streams) for reader in self.readers]
        for reader, own in zip(self.readers, rows, strict=True):
            keep_hidden_(maps.blocks, maps, own, reader.kept)
        logits = self.decoder.logits(gather_output_rows(hidden, inputs["logits_indices"]))
        more = [own for reader, own in zip(self.readers, rows, strict=True) if reader.has_own_rows]
        return [hidden, logits, *more]

    def rows_of_readers(self, hidden: Tensor, more: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of each reader, of what `run` returned: `hidden`, and what follows after the logits."""
        left = iter(more)
        return [next(left) if reader.has_own_rows else hidden for reader in self.readers]


class EagerForward:
    """Calls the ops one by one.

    Args:
        memory: of the steps.
        block_tables: per KV group i32[max_num_seqs, max_blocks], the requests' blocks by table row.
    """

    def __init__(self, forward_pass: ForwardPass, memory: StepMemory, block_tables: Sequence[I32]) -> None:
        self._pass, self._memory, self._block_tables = forward_pass, memory, block_tables
        config, limits = forward_pass.decoder.config, memory.limits
        self.hidden = device().zeros((limits.num_tokens, config.hidden_size), storage(forward_pass.decoder.dtype))
        more = [
            device().zeros((limits.num_tokens, r.kept.blocks.shape[1]), storage(forward_pass.decoder.dtype))
            for r in forward_pass.readers
            if r.has_own_rows
        ]
        self.draft_rows: Sequence[Tensor] = forward_pass.rows_of_readers(self.hidden, more)
        self._rows = [device().read(rows) for rows in (self.hidden, *more)]
        self.logits: F32 = np.zeros((limits.num_logits, config.vocab_size), np.float32)

    def __call__(self) -> None:
        m = self._memory
        counts = {"num_tokens": m.num_tokens, "num_requests": m.num_requests, "num_logits": m.num_logits}
        tensors = {}
        for name, array in input_arrays(m, self._block_tables).items():
            dim = (SHAPES | STATE_SHAPES | ADAPTER_SHAPES).get(name)
            tensors[name] = device().wrap(array if dim is None else array[: counts[dim.name] + dim.extra])
        hidden, logits, *more = self._pass.run(tensors)
        for kept, rows in zip(self._rows, (hidden, *more), strict=True):
            kept[: m.num_tokens] = device().read(rows)
        self.logits[: m.num_logits] = device().read(logits)


class RecordedForward:
    """Replays the ops as they were recorded; memory and block_tables as EagerForward's.

    Args:
        forward_pass: the ops of `on_stored` and of readers are recorded too.
        buffers: of the memory and the tables, where the model is on a device.
        known: with these the pass first corrects the step's lengths, where the device has tokens before the host.

    Raises:
        RecordingError: the model does something that cannot be recorded.
        ConfigError: the system has no memory for steps as large as they can be.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        memory: StepMemory,
        block_tables: Sequence[I32],
        buffers: DeviceBuffers = HOST_BUFFERS,
        known: KnownTokens | None = None,
    ) -> None:
        recorder, limits = Recorder(), memory.limits
        arrays, shapes = input_arrays(memory, block_tables), SHAPES | STATE_SHAPES | ADAPTER_SHAPES
        if known is not None:
            shapes |= RESOLVED_SHAPES
            arrays |= {name: getattr(memory, name) for name in (*RESOLVED_SHAPES, "draft_token_ids")}
            arrays |= {"token_table": known.tokens, "num_known": known.num_tokens, "made_drafts": known.made_drafts}
        inputs = {
            name: recorder.add_input(
                name,
                paddle.int64 if array.dtype == np.int64 else paddle.int32,
                (shapes[name],) if name in shapes else array.shape,
            )
            for name, array in arrays.items()
        }
        if known is not None:
            _resolve_lengths(inputs, forward_pass.caches[0].block_size)
        outputs = forward_pass.run(inputs)
        bounds = {
            "num_tokens": limits.num_tokens,
            "num_requests": limits.num_requests,
            "num_logits": limits.num_logits,
        }
        self._memory, self._buffers = memory, buffers
        self.program = device().program(
            Recording(recorder, outputs, bounds, {name: value for name, value in PADDING.items() if name in inputs}),
            {name: buffers.of(array) for name, array in arrays.items()},
        )
        self.hidden, logits, *more = self.program.outputs
        self.draft_rows: Sequence[Tensor] = forward_pass.rows_of_readers(self.hidden, more)
        [self.logits] = logit_rows(logits)

    def __call__(self) -> None:
        self._buffers.send_plan()
        self.program.run(self.sizes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of the step that the memory holds."""
        m = self._memory
        return {"num_tokens": m.num_tokens, "num_requests": m.num_requests, "num_logits": m.num_logits}


def _resolve_lengths(inputs: Mapping[str, Any], block_size: int) -> None:
    """Correct the step's lengths and places; see ops.reference.batch.settle_step_."""
    tables = KnownTokens(*(inputs[name] for name in ("token_table", "num_known", "block_tables", "made_drafts")))
    offsets = inputs["query_start_loc"], inputs["cu_num_logits"], inputs["cu_num_draft"]
    settle_step_(tables, block_size, inputs["table_rows"], offsets, **{name: inputs[name] for name in RESOLVED})


@dataclass(frozen=True, slots=True, eq=False)
class StepResources:
    """Made once, when the model is loaded; `buffers` are of the memory and the table.

    `compact_paths`: see PathCompaction. `adapters`: None = the model runs with none.
    """

    forward: Forward
    compact_paths: Callable[[], None]
    prompts: PromptRows
    memory: StepMemory
    table: RequestTable
    signals: LayerSignals | None = None
    buffers: DeviceBuffers = HOST_BUFFERS
    adapters: AdapterRows | None = None
