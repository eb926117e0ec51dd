"""The memory of a drafting step of a model, and the host's plan: which KV slots it fills, how many drafts it makes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastdeploy_sd.ops.mtp import MTP_COLLECT, MTP_PLAN
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import F32, I32


class DraftMemory:
    """Arrays and counts of a drafting step of at most R requests; nothing is allocated in a step.

    Attributes:
        columns: i32[n], one piece of memory: num_read entries of columns that passes read, then those that they write.
        table_rows .. min_survival: see ops.mtp.DraftBatch. A draft that was not made is -1.
        max_draft_len, num_valid, num_kv_slots: i32[R]; see spec_decode.proposer.
        begin, hidden_begin, cu_hidden, draft_start_loc, ends: see passes.DraftStep.
        kept: i32[D]; see MTP_COLLECT.
        of_draft: by name the columns of DraftStep.drafts; {} where a model does not make all drafts in one pass.
        counts: num_filling i32[1], then num_tokens i32[num_layers], then num_drafting, as MTP_PLAN writes them.
        num_tokens: rows of each layer's first pass.
        num_drafting: requests that may get more than i drafts, by i.
    """

    def __init__(self, num_requests: int, num_layers: int, num_steps: int, *, drafts_at_once: bool = False) -> None:
        requests, drafts = num_requests, num_requests * num_steps
        read = dict.fromkeys(("table_rows", "num_committed", "begin", "hidden_begin", "min_survival"), requests)
        read |= {"ends": num_layers * requests}
        read |= dict.fromkeys(("cu_num_draft", "cu_hidden", "draft_start_loc"), requests + 1)
        of_draft = {"draft_offsets": drafts + 1, "no_rows": drafts, "one_each": drafts, "draft_survival": drafts}
        read |= of_draft if drafts_at_once else {}
        written = {"num_wanted": requests, "draft_token_ids": drafts, "draft_prob": drafts}
        self.num_read = sum(read.values())
        self.columns: I32 = np.zeros(self.num_read + sum(written.values()), np.int32)
        begin, cut = 0, {}
        for name, length in (read | written).items():
            cut[name] = self.columns[begin : begin + length]
            begin += length
        self.table_rows, self.num_committed = cut["table_rows"], cut["num_committed"]
        self.begin, self.hidden_begin = cut["begin"], cut["hidden_begin"]
        self.min_survival = cut["min_survival"].view(np.float32)
        self.ends = cut["ends"].reshape(num_layers, requests)
        self.cu_num_draft, self.cu_hidden = cut["cu_num_draft"], cut["cu_hidden"]
        self.draft_start_loc, self.num_wanted = cut["draft_start_loc"], cut["num_wanted"]
        self.draft_token_ids, self.draft_prob = cut["draft_token_ids"], cut["draft_prob"].view(np.float32)
        self.max_draft_len, self.num_valid, self.num_kv_slots = np.zeros((3, requests), np.int32)
        self.of_draft: dict[str, I32 | F32] = {name: cut[name] for name in of_draft if name in cut}
        if drafts_at_once:
            cut["draft_offsets"][:], cut["one_each"][:] = np.arange(drafts + 1), 1
            self.of_draft["draft_survival"] = cut["draft_survival"].view(np.float32)
        self.kept = np.zeros(drafts, np.int32)
        self.counts = np.zeros(1 + num_layers + max(num_layers, num_steps) + 1, np.int32)
        self.count = 0
        self.take_counts()

    def take_counts(self) -> bool:
        """Read `counts`; returns whether any request fills a slot."""
        num_filling, *counts = self.counts.tolist()
        num_layers = len(self.ends)
        self.num_tokens, self.num_drafting = counts[:num_layers], counts[num_layers:]
        self.num_steps = len(self.num_drafting) - self.num_drafting.count(0)
        return bool(num_filling)

    def set_survival(self, least: float) -> None:
        """Set `min_survival` of every draft that is made with the others of its request."""
        if self.of_draft:
            self.of_draft["draft_survival"][:] = least

    def per_request(self) -> Mapping[str, I32 | F32]:
        """The columns with a value per request that passes read, by name, whole."""
        ends = {f"end_{layer}": end for layer, end in enumerate(self.ends)}
        names = ("table_rows", "num_committed", "begin", "hidden_begin", "num_wanted", "min_survival")
        return {name: getattr(self, name) for name in names} | ends

    def per_draft(self) -> Mapping[str, I32 | F32]:
        """The columns with a value per draft, by name, whole; the passes write them."""
        return {"draft_token_ids": self.draft_token_ids, "draft_prob": self.draft_prob}

    def offsets(self) -> Mapping[str, I32]:
        """The columns that begin with 0 and have one value more."""
        return {name: getattr(self, name) for name in ("cu_num_draft", "cu_hidden", "draft_start_loc")}


class StepPlan:
    """Plans step after step, and notes in `next_slot` what was filled; see MTP_PLAN."""

    def __init__(
        self, model: LoadedDraftModel, memory: DraftMemory, next_slot: I32, num_begun: I32, num_steps: int
    ) -> None:
        m = self._memory = memory
        self._max_position = model.max_position
        num_layers = len(m.ends)
        drafts = {"cu_num_draft": m.cu_num_draft, "draft_token_ids": m.draft_token_ids}
        self._plan = MTP_PLAN.bind(
            **drafts,
            table_rows=m.table_rows,
            num_committed=m.num_committed,
            max_draft_len=m.max_draft_len,
            num_computed=m.hidden_begin,
            num_valid=m.num_valid,
            num_kv_slots=m.num_kv_slots,
            next_slot=next_slot,
            num_begun=num_begun,
            num_steps=num_steps,
            max_position=0,
            block_size=model.block_size,
            max_filled=model.max_filled,
            num_newest=model.num_newest,
            num_more=model.num_more,
            reads_hidden=int(model.fills_in_time),
            begin=m.begin,
            ends=m.ends,
            num_wanted=m.num_wanted,
            draft_start_loc=m.draft_start_loc,
            num_filling=m.counts[:1],
            num_tokens=m.counts[1 : 1 + num_layers],
            num_drafting=m.counts[1 + num_layers :],
        )
        self._collect = MTP_COLLECT.bind(
            **drafts,
            table_rows=m.table_rows,
            begin=m.begin,
            end=m.ends[0],
            next_slot=next_slot,
            draft_prob=m.draft_prob,
            kept=m.kept,
        )

    def make(self, x: ProposeInput, step: TargetStep) -> bool:
        """Write the plan of the draft layers into the memory; returns whether they compute anything."""
        m, n = self._memory, len(x.table_rows)
        limits = x.max_draft_len
        if x.prefix is not None:
            limits = np.where(np.diff(x.prefix.cu_num_draft) == 0, limits, 0).astype(np.int32)
        m.count = n
        m.table_rows[:n], m.num_committed[:n], m.max_draft_len[:n] = x.table_rows, x.num_tokens, limits
        m.hidden_begin[:n], m.cu_hidden[: n + 1] = step.num_computed_tokens, step.query_start_loc
        m.num_valid[:n], m.num_kv_slots[:n] = step.num_valid, step.num_kv_slots
        params = self._plan.params
        params.num_requests, params.max_position = n, min(x.token_table.shape[1], self._max_position)
        self._plan.run()
        return m.take_counts()

    def collect(self) -> None:
        """Note which slots are filled, and close the gaps of drafts that were not made."""
        self._collect.params.num_requests = self._memory.count
        self._collect.run()
