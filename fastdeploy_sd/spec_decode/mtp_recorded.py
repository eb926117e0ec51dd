"""The passes of a step of MTP drafting as one native call.

`run_passes` is run on symbolic tensors when the model is loaded, once per number of drafts; a step replays the ops
that it called. The bits are those of EagerPasses. One step replays one of the recordings, so all share their memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.ops.arena import Arena
from fastdeploy_sd.ops.lowering import LOWERINGS
from fastdeploy_sd.ops.mtp import DraftBatch, MtpPass
from fastdeploy_sd.ops.program import Program
from fastdeploy_sd.ops.recorder import Recorder, Size
from fastdeploy_sd.spec_decode.mtp_passes import NOTHING_TO_RUN, DraftStep, MtpTarget, run_passes


class RecordedPasses:
    """Replays the ops as they were recorded; arguments as EagerPasses'. What a run returns, the next one overwrites.

    Args:
        max_steps: most drafts of a request.
        has_logits: whether a step may want logits. Nothing is recorded once requests run.

    Raises:
        RecordingError: the layers do something that cannot be recorded.
    """

    def __init__(
        self, target: MtpTarget, request_hidden: Sequence[Tensor], max_steps: int, *, has_logits: bool
    ) -> None:
        self._target, self._request_hidden = target, request_hidden
        self._arena = Arena()
        # The most drafts first: the others then fit into their memory.
        self._programs = {
            (num_steps, wants_logits): self._record(num_steps, wants_logits=wants_logits)
            for num_steps in range(max_steps, NOTHING_TO_RUN - 1, -1)
            for wants_logits in ((True, False) if has_logits else (False,))
        }

    def run(self, step: DraftStep, *, wants_logits: bool) -> Sequence[Tensor]:
        """See DraftPasses.run."""
        return self._programs[step.num_steps, wants_logits].run(_columns(step), _sizes(step))

    def _record(self, num_steps: int, wants_logits: bool) -> Program:
        recorder = Recorder(LOWERINGS)
        step = _symbolic_step(recorder, self._target, self._request_hidden[0], num_steps)
        logits: Any = run_passes(self._target, self._request_hidden, step)
        return Program(recorder, logits if wants_logits else (), self._arena)


class _SymbolicBatch(DraftBatch):
    """A batch whose counts are sizes of the recording."""

    __slots__ = ()

    def num_drafting(self, step: int) -> Any:
        return Size(f"num_drafting_{step}")


class _SymbolicPass(MtpPass):
    """A pass whose count is a size of the recording."""

    __slots__ = ()

    def num_tokens(self) -> Any:
        return Size(f"num_tokens_{self.source}")


class _SymbolicStep(DraftStep):
    """A step of symbolic tensors."""

    __slots__ = ()

    def first_pass(self) -> MtpPass:
        return _SymbolicPass(self.begin, self.ends[0], 0, self.hidden_begin, self.hidden_end, self.cu_hidden)

    def later_pass(self, layer: int, cu_hidden: Any) -> MtpPass:
        return _SymbolicPass(self.begin, self.ends[layer], layer, self.begin, self.ends[0], cu_hidden)


def _symbolic_step(recorder: Recorder, target: MtpTarget, row: Tensor, num_steps: int) -> DraftStep:
    """A step whose parts are inputs of the recording, named as in _columns; `row` is like the hidden rows."""
    requests, slots = Size("num_requests"), Size("num_slots")
    per_request, offsets = (requests,), (requests + 1,)

    def column(name: str, shape: tuple[int | Size, ...] = per_request) -> Any:
        return recorder.add_input(name, paddle.int32, shape)

    batch = _SymbolicBatch(
        slots=column("slots"),
        num_committed=column("num_committed"),
        cu_num_draft=column("cu_num_draft", offsets),
        draft_token_ids=column("draft_token_ids", (Size("num_drafts"),)),
        token_table=column("token_table", (slots, Size("max_tokens_per_row"))),
        block_table=column("block_table", (slots, Size("max_blocks_per_row"))),
        block_size=target.caches[0].block_size,
    )
    hidden: Any = recorder.add_input("hidden", row.dtype, (Size("num_hidden"), row.shape[1]))
    return _SymbolicStep(
        batch=batch,
        begin=column("begin"),
        ends=tuple(column(f"end_{layer}") for layer in range(target.model.num_layers)),
        hidden=hidden,
        hidden_begin=column("hidden_begin"),
        hidden_end=column("hidden_end"),
        cu_hidden=column("cu_hidden", offsets),
        block_tables=column("block_tables", (requests, Size("max_blocks"))),
        draft_start_loc=column("draft_start_loc", offsets),
        num_steps=num_steps,
    )


def _columns(step: DraftStep) -> dict[str, Any]:
    batch = step.batch
    return {
        "slots": batch.slots,
        "num_committed": batch.num_committed,
        "cu_num_draft": batch.cu_num_draft,
        "draft_token_ids": batch.draft_token_ids,
        "token_table": batch.token_table,
        "block_table": batch.block_table,
        "hidden": step.hidden,
        "begin": step.begin,
        **{f"end_{layer}": end for layer, end in enumerate(step.ends)},
        "hidden_begin": step.hidden_begin,
        "hidden_end": step.hidden_end,
        "cu_hidden": step.cu_hidden,
        "block_tables": step.block_tables,
        "draft_start_loc": step.draft_start_loc,
    }


def _sizes(step: DraftStep) -> Mapping[str, int]:
    """The counts that no column's length tells: rows of every pass, and requests with more than i drafts."""
    num_tokens = {f"num_tokens_{layer}": int((end - step.begin).sum()) for layer, end in enumerate(step.ends)}
    largest = max(step.num_steps, len(step.ends))
    with_count = np.bincount(np.diff(step.batch.cu_num_draft), minlength=largest + 2)
    with_more = len(step.begin) - np.cumsum(with_count)
    return num_tokens | {f"num_drafting_{i}": int(with_more[i]) for i in range(largest + 1)}
