"""Drafts after an in-flight step, whose tokens only the device has: planned, made and verified there.

The device plans by the same ops as the host. It cannot change the size of a pass, so the host gives upper bounds, and
the rows after a step's own are padding. When the tokens are known, the host plans the step again and notes the slots
that were filled. Then both have the same state.

    next_slot   host     after the last finished step
                device   after the last started step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device.device import constant, device
from fastdeploy_sd.ops.batch import TARGET_STEP
from fastdeploy_sd.ops.mtp import MTP_HOLD, MTP_PLAN
from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory, StepPlan
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.spec_decode.model_based.recorded_passes import RecordedPasses
from fastdeploy_sd.spec_decode.proposer import PendingStep, ProposeInput
from fastdeploy_sd.types import I32, MADE_ON_DEVICE, DraftSource, DraftTokens


class AsyncPasses:
    """See the module, and proposer.AsyncDrafter.

    Args:
        columns: of the step on the device, by their names in StepMemory.
        memory: of the passes; its twin is written by the device, but for `min_survival`.
        next_slot, num_begun: i32[S], the host's.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (what drafting goes through)
        self,
        model: LoadedDraftModel,
        columns: Mapping[str, Any],
        memory: DraftMemory,
        passes: RecordedPasses,
        next_slot: I32,
        num_begun: I32,
        num_steps: int,
    ) -> None:
        self._passes, self._next_slot, self._num_steps = passes, next_slot, num_steps
        self._source = int(model.method.source or DraftSource.CUSTOM)
        self._num_layers, self._num_counts = len(memory.ends), len(memory.num_drafting)
        self._max_position, self._max_unfilled = model.token_table.shape[1], model.kept_hidden[0].num_kept
        self._num_newest, self._num_more = model.num_newest, model.num_more
        self._replayed = DraftMemory(len(memory.begin), self._num_layers, num_steps)
        self._replay = StepPlan(model, self._replayed, next_slot, num_begun, num_steps)
        self._slots, self._begun = device().buffer(next_slot), device().buffer(num_begun)
        # i32[S], slots that the last started step may have left unfilled in a row, at most.
        self._num_unfilled = np.zeros_like(next_slot)
        self._is_stale = False
        passes.send()
        self._bind_calls(model, columns, memory)

    def _bind_calls(self, model: LoadedDraftModel, columns: Mapping[str, Any], m: DraftMemory) -> None:
        block_size = model.block_size
        twin, num_rows = self._passes.twin, len(m.begin)
        run = {name: device().zeros((num_rows,), np.int32) for name in ("num_valid", "num_kv_slots")}
        known = {name: columns[name] for name in ("table_rows", "num_computed", "num_committed")}
        self._find_target = device().bind(
            TARGET_STEP,
            **known,
            **run,
            num_new=columns["num_new"],
            cu_num_logits=columns["cu_num_logits"],
            cu_num_output=columns["cu_num_output"],
            num_blocks=columns["num_blocks"],
            block_size=block_size,
            max_tokens_per_row=self._max_position,
        )
        counts = device().zeros((len(m.counts),), np.int32)
        drafts = {"cu_num_draft": twin(m.cu_num_draft), "draft_token_ids": twin(m.draft_token_ids)}
        self._plan = device().bind(
            MTP_PLAN,
            **known,
            **run,
            **drafts,
            max_draft_len=columns["max_draft_len"],
            next_slot=self._slots.tensor,
            num_begun=self._begun.tensor,
            num_steps=self._num_steps,
            max_position=self._max_position,
            block_size=block_size,
            max_filled=model.max_filled,
            num_newest=model.num_newest,
            num_more=model.num_more,
            reads_hidden=int(model.fills_in_time),
            begin=twin(m.begin),
            ends=twin(m.ends),
            num_wanted=twin(m.num_wanted),
            draft_start_loc=twin(m.draft_start_loc),
            num_filling=counts[:1],
            num_tokens=counts[1 : 1 + self._num_layers],
            num_drafting=counts[1 + self._num_layers :],
        )
        self._hold = device().bind(
            MTP_HOLD,
            **drafts,
            table_rows=columns["table_rows"],
            begin=twin(m.begin),
            end=twin(m.ends[0]),
            next_slot=self._slots.tensor,
            made_drafts=columns["made_drafts"],
        )
        # What padding overwrites.
        self._whole = [(twin(column), constant(column)) for column in m.of_draft.values()]
        # Columns of the step that the passes read, and their sources.
        self._copies = [
            (twin(m.table_rows), columns["table_rows"], 0),
            (twin(m.num_committed), columns["num_committed"], 0),
            (twin(m.hidden_begin), columns["num_computed"], 0),
            (twin(m.cu_hidden), columns["query_start_loc"], 1),
        ]

    def send(self, table_rows: Sequence[int]) -> None:
        """Send the host's state of new and ended requests to the device."""
        for row in table_rows:
            self._slots.upload(row, row + 1)
            self._begun.upload(row, row + 1)

    def restart(self) -> None:
        self._is_stale = True

    def start(self, step: PendingStep) -> None:
        if self._is_stale:
            self._slots.upload()
            self._is_stale = False
        n, sizes = len(step.table_rows), self._sizes(step)
        for call in (self._find_target, self._plan, self._hold):
            call.params.num_requests = n
        self._find_target.run()
        self._plan.run()
        for to, source, extra in self._copies:
            device().copy(to[: n + extra], source[: n + extra])
        for to, source in self._whole:
            device().copy(to, source)
        self._passes.start(n, *sizes)
        self._hold.run()

    def _sizes(self, step: PendingStep) -> tuple[list[int], list[int]]:
        """Return upper bounds: rows of each layer's first pass, and requests that get more than i drafts."""
        rows, most = step.table_rows, self._max_unfilled
        next_slot = self._next_slot.take(rows)
        is_ours, is_due = next_slot >= 0, step.max_output > 0
        unfilled = np.where(step.follows, self._num_unfilled.take(rows), step.num_computed + 1 - next_slot)
        fills = np.where(is_ours, unfilled + step.num_new, 0)
        room = np.minimum(step.num_kv_slots, self._max_position) - step.max_tokens + 1 - self._num_more
        is_filled = np.where(is_due, np.minimum(step.sure_draft_len, room) > 0, True)
        # A failed row fills nothing, but counts as filled. Until the host drops it, each later step computes its newest
        # token again, to the same bits. So it fails there too and needs no room.
        self._num_unfilled[rows] = np.minimum(np.where(is_filled, ~is_due, fills), most)
        num_drafts = np.where(is_ours & is_due, np.minimum(step.max_draft_len, self._num_steps), 0)
        num_drafting = [int(np.count_nonzero(num_drafts > i)) for i in range(self._num_counts)]
        num_tokens = int(np.minimum(fills, self._num_newest).sum())
        return [num_tokens + layer * num_drafting[layer] for layer in range(self._num_layers)], num_drafting

    def finish(self, x: ProposeInput) -> DraftTokens:
        assert x.target is not None, "a draft model reads what the target ran"
        self._replay.make(x, x.target)
        cu = self._replayed.cu_num_draft[: len(x.table_rows) + 1].copy()
        self._replay.collect()
        num_drafts = cu.item(len(x.table_rows))
        sources = np.full(num_drafts, self._source, np.int8)
        return DraftTokens(np.full(num_drafts, MADE_ON_DEVICE, np.int32), cu, sources)
