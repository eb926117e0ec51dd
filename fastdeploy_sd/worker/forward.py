"""The model's forward pass over a step: hidden rows of every token, logits of those that were asked for.

EagerForward calls the model's Python; it is the definition. RecordedForward runs that Python once, when the model is
loaded, and then replays the ops it called as one native call per step. Both give the same bits, and both read a step's
memory and leave their result where it always is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.layers.attention import AttentionInputs
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.ops.batch import gather_output_rows, settle_step_
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.kv_cache import KvCache, RequestBlocks, Rotary
from fastdeploy_sd.ops.logprob_rows import logit_rows
from fastdeploy_sd.runtime.arrays import Array
from fastdeploy_sd.runtime.device import device
from fastdeploy_sd.runtime.program import Padding, Recording
from fastdeploy_sd.runtime.recorder import Recorder, Size
from fastdeploy_sd.runtime.twins import HOST_TWINS, RowsOnDevice, Twins
from fastdeploy_sd.step_memory import StepMemory
from fastdeploy_sd.types import F32, I32

OnStored = Callable[[KvCache[Tensor], AttentionInputs], None]
OnHidden = Callable[[AttentionInputs, Tensor], None]


class KnownTokens(NamedTuple):
    """What a device has of the requests when a step begins there; see ops.reference.batch.SettleTables."""

    tokens: Any
    num_tokens: Any
    blocks: Any
    made_drafts: Any


class Forward(Protocol):
    """Runs the step's tokens and stores their KV.

    Attributes:
        hidden: [T, H] after the final norm, in the model's dtype.
        logits: f32[L, V], a row for each of the step's logits_indices.
    """

    hidden: Tensor

    @property
    def logits(self) -> F32 | RowsOnDevice: ...

    def __call__(self) -> None:
        """Run the step that the memory holds."""
        ...


class EagerForward:
    """Calls the ops one by one.

    Args:
        caches: one per decoder layer.
        rotary: its table has max_model_len rows.
        memory: of the steps.
        block_tables: i32[max_num_seqs, max_blocks], the requests' blocks by table row.
        on_stored: see AttentionInputs.
        on_hidden: called with the pass's hidden rows, all of them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (what a pass goes through)
        self,
        decoder: Decoder,
        caches: Sequence[KvCache[Tensor]],
        rotary: Rotary[Tensor],
        memory: StepMemory,
        block_tables: I32,
        on_stored: OnStored | None = None,
        on_hidden: OnHidden | None = None,
    ) -> None:
        self._decoder, self._caches, self._rotary = decoder, caches, rotary
        self._memory, self._block_tables = memory, block_tables
        self._on_stored, self._on_hidden = on_stored, on_hidden
        config, limits = decoder.config, memory.limits
        self.hidden = device().zeros((limits.num_tokens, config.hidden_size), storage(decoder.dtype))
        self._rows = device().read(self.hidden)
        self.logits: F32 = np.zeros((limits.num_logits, config.vocab_size), np.float32)

    def __call__(self) -> None:
        m = self._memory
        counts = {"num_tokens": m.num_tokens, "num_requests": m.num_requests, "num_logits": m.num_logits}
        tensors = {}
        for name, array in _inputs(m, self._block_tables).items():
            dim = _SHAPES.get(name)
            tensors[name] = device().wrap(array if dim is None else array[: counts[dim.name] + dim.extra])
        hidden, logits = _run(self._decoder, self._caches, self._rotary, tensors, self._on_stored, self._on_hidden)
        self._rows[: m.num_tokens] = device().read(hidden)
        self.logits[: m.num_logits] = device().read(logits)


class RecordedForward:
    """Replays the ops as they were recorded; arguments as EagerForward's.

    Args:
        on_stored, on_hidden: what they call is recorded.
        twins: of the memory and the tables, where the model is on a device.
        known: by what the pass first moves the step to where it belongs, where the device has tokens before the host.

    Raises:
        RecordingError: the model does something that cannot be recorded.
        ConfigError: the system has no memory for steps as large as they can be.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (what a pass goes through)
        self,
        decoder: Decoder,
        caches: Sequence[KvCache[Tensor]],
        rotary: Rotary[Tensor],
        memory: StepMemory,
        block_tables: I32,
        on_stored: OnStored | None = None,
        on_hidden: OnHidden | None = None,
        twins: Twins = HOST_TWINS,
        known: KnownTokens | None = None,
    ) -> None:
        recorder, limits = Recorder(), memory.limits
        arrays, shapes = _inputs(memory, block_tables), _SHAPES
        if known is not None:
            shapes = _SHAPES | _SETTLED_SHAPES
            arrays |= {name: getattr(memory, name) for name in (*_SETTLED_SHAPES, "draft_token_ids")}
            arrays |= {"token_table": known.tokens, "num_known": known.num_tokens, "made_drafts": known.made_drafts}
        inputs = {
            name: recorder.add_input(
                name,
                paddle.int64 if name == "slot_mapping" else paddle.int32,
                (shapes[name],) if name in shapes else array.shape,
            )
            for name, array in arrays.items()
        }
        bounds = {
            "num_tokens": limits.num_tokens,
            "num_requests": limits.num_requests,
            "num_logits": limits.num_logits,
        }
        if known is not None:
            tables = (inputs[name] for name in ("token_table", "num_known", "block_tables", "made_drafts"))
            settle_step_(
                KnownTokens(*tables),
                caches[0].block_size,
                inputs["table_rows"],
                (inputs["query_start_loc"], inputs["cu_num_logits"], inputs["cu_num_draft"]),
                **{name: inputs[name] for name in _SETTLED},
            )
        outputs = _run(decoder, caches, rotary, inputs, on_stored, on_hidden)
        self._memory, self._twins = memory, twins
        self.program = device().program(
            Recording(recorder, outputs, bounds, {name: value for name, value in _PADDING.items() if name in inputs}),
            {name: twins.of(array) for name, array in arrays.items()},
        )
        self.hidden, logits = self.program.outputs
        [self.logits] = logit_rows(logits)

    def __call__(self) -> None:
        self._twins.send_plan()
        self.program.run(self.sizes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Those of the step that the memory holds."""
        m = self._memory
        return {"num_tokens": m.num_tokens, "num_requests": m.num_requests, "num_logits": m.num_logits}


_SHAPES = {
    "input_ids": Size("num_tokens"),
    "positions": Size("num_tokens"),
    "slot_mapping": Size("num_tokens"),
    "query_start_loc": Size("num_requests") + 1,
    "seq_lens": Size("num_requests"),
    "table_rows": Size("num_requests"),
    "logits_indices": Size("num_logits"),
}
# What is moved besides where a step begins before the host knows the tokens of the one before it.
_SETTLED_SHAPES = {
    "num_computed": Size("num_requests"),
    "output_positions": Size("num_logits"),
    "cu_num_logits": Size("num_requests") + 1,
    "cu_num_draft": Size("num_requests") + 1,
}
_SETTLED = (
    "input_ids", "positions", "slot_mapping", "num_computed", "seq_lens", "output_positions", "draft_token_ids",
)  # fmt: skip
# What fills rows behind a step's own, where a device rounds sizes up: they are nobody's, and write nothing.
_PADDING: Padding = {
    **dict.fromkeys(_SHAPES | _SETTLED_SHAPES, 0),
    **dict.fromkeys(("query_start_loc", "cu_num_logits", "cu_num_draft"), "last"),
    "slot_mapping": -1,
}


def _inputs(memory: StepMemory, block_tables: I32) -> dict[str, Array]:
    """What the pass reads, whole."""
    return {name: getattr(memory, name) for name in _SHAPES} | {"block_tables": block_tables}


def _run(
    decoder: Decoder,
    caches: Sequence[KvCache[Tensor]],
    rotary: Rotary[Tensor],
    inputs: dict[str, Any],
    on_stored: OnStored | None = None,
    on_hidden: OnHidden | None = None,
) -> tuple[Any, Any]:
    """The pass itself, on tensors or on symbolic ones: hidden rows and logits."""
    maps = AttentionInputs(
        positions=inputs["positions"],
        slot_mapping=inputs["slot_mapping"],
        query_start_loc=inputs["query_start_loc"],
        seq_lens=inputs["seq_lens"],
        blocks=RequestBlocks(inputs["table_rows"], inputs["block_tables"]),
        rotary=rotary,
        on_stored=on_stored,
    )
    hidden = decoder.forward(inputs["input_ids"], caches, maps)
    if on_hidden is not None:
        on_hidden(maps, hidden)
    return hidden, decoder.logits(gather_output_rows(hidden, inputs["logits_indices"]))
