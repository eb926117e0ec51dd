"""The model's forward pass over a step: hidden rows of every token, logits of those that were asked for.

EagerForward calls the model's Python; it is the definition. RecordedForward runs that Python once, when the model is
loaded, and then replays the ops it called as one native call per step. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import paddle
from paddle import Tensor

from fastdeploy_sd.layers.attention import AttentionInputs
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary
from fastdeploy_sd.ops.lowering import LOWERINGS
from fastdeploy_sd.ops.native.arrays import Array
from fastdeploy_sd.ops.program import Program
from fastdeploy_sd.ops.recorder import Recorder, Size
from fastdeploy_sd.ops.tensors import from_numpy, to_numpy
from fastdeploy_sd.types import F32, Batch


class ForwardOutput(NamedTuple):
    """What a pass returns. Valid until the next one.

    Attributes:
        hidden: [T, H] after the final norm, in the model's dtype.
        logits: f32[L, V], a row for each of the batch's logits_indices.
    """

    hidden: Tensor
    logits: F32


class Forward(Protocol):
    """Runs the step's tokens and stores their KV."""

    def __call__(self, batch: Batch) -> ForwardOutput:
        """Run a step; the same Batch as last time if only what is in its arrays differs."""
        ...


class EagerForward:
    """Calls the ops one by one.

    Args:
        caches: one per decoder layer.
        rotary: its table has max_model_len rows.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[KvCache[Tensor]], rotary: Rotary[Tensor]) -> None:
        self._decoder, self._caches, self._rotary = decoder, caches, rotary

    def __call__(self, batch: Batch) -> ForwardOutput:
        tensors = {name: from_numpy(array) for name, array in _inputs(batch).items()}
        hidden, logits = _run(self._decoder, self._caches, self._rotary, tensors)
        return ForwardOutput(hidden, to_numpy(logits))


class RecordedForward:
    """Replays the ops as they were recorded; arguments as EagerForward's.

    Raises:
        RecordingError: the model does something that cannot be recorded.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[KvCache[Tensor]], rotary: Rotary[Tensor]) -> None:
        recorder = Recorder(LOWERINGS)
        tokens, requests = Size("num_tokens"), Size("num_requests")
        shapes = {
            "input_ids": (tokens,),
            "positions": (tokens,),
            "slot_mapping": (tokens,),
            "query_start_loc": (requests + 1,),
            "seq_lens": (requests,),
            "block_tables": (requests, Size("max_blocks")),
            "logits_indices": (Size("num_logits"),),
        }
        dtypes = {"slot_mapping": paddle.int64}
        inputs = {
            name: recorder.add_input(name, dtypes.get(name, paddle.int32), shape) for name, shape in shapes.items()
        }
        self.program = Program(recorder, _run(decoder, caches, rotary, inputs))
        self._last: tuple[Batch, dict[str, Array]] | None = None
        self._output: tuple[Tensor, ForwardOutput] | None = None

    def __call__(self, batch: Batch) -> ForwardOutput:
        if self._last is None or self._last[0] is not batch:
            self._last = batch, _inputs(batch)
        hidden, logits = self.program.run(self._last[1])
        # Steps of equal size give the same tensors, and looking at one anew costs 0.1 ms with cold caches.
        if self._output is None or self._output[0] is not logits:
            self._output = logits, ForwardOutput(hidden, to_numpy(logits))
        return self._output[1]


def _inputs(batch: Batch) -> dict[str, Array]:
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "block_tables": batch.block_tables,
        "logits_indices": batch.logits_indices,
    }


def _run(
    decoder: Decoder, caches: Sequence[KvCache[Tensor]], rotary: Rotary[Tensor], inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The pass itself, on tensors or on symbolic ones: hidden rows and logits."""
    maps = AttentionInputs(
        positions=inputs["positions"],
        slot_mapping=inputs["slot_mapping"],
        query_start_loc=inputs["query_start_loc"],
        seq_lens=inputs["seq_lens"],
        block_tables=inputs["block_tables"],
        rotary=rotary,
    )
    hidden = decoder.forward(inputs["input_ids"], caches, maps)
    return hidden, decoder.logits(gather_output_rows(hidden, inputs["logits_indices"]))
