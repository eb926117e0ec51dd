"""An executor over the toy model, with a KV cache that remembers what was written where and checks what is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np

from fastdeploy_sd.engine.interfaces.block_store import BlockStore
from fastdeploy_sd.engine.interfaces.executor import AdapterReader, Launcher
from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import (
    MADE_ON_DEVICE,
    DraftSource,
    DraftTokens,
    LogprobArrays,
    ModelInfo,
    NewRequest,
    Request,
    RequestId,
    SchedulerOutput,
    StepResult,
    VerifyResult,
)
from tests.doubles.toy_adapters import ToyAdapters
from tests.doubles.toy_draft_layers import ToyDraftLayers, slot_of
from tests.doubles.toy_logprobs import toy_logprobs
from tests.doubles.toy_model import ToyModel, extend_prefix, root_prefix
from tests.doubles.toy_states import ToyStates

BEFORE, AFTER = "before", "after"
ToySlots = tuple[tuple[int, int] | None, ...]
ToyBlock = tuple[ToySlots, ToySlots]
"""What the target's and the draft layers' caches hold of a block, slot by slot."""


@dataclass(eq=False)
class _Row:
    """What an executor keeps of a request: committed tokens, prefix hashes after each of them, block tables.

    Attributes:
        drafted: (token, source) of what was last proposed.
        has_failed: whether what it gives belongs to no request.
    """

    request: Request
    token_ids: list[int]
    tables: list[list[int]]
    num_prompt_tokens: int
    table_row: int
    adapter_slot: int = -1
    prefixes: list[int] = field(default_factory=list)
    drafted: list[tuple[int, int]] = field(default_factory=list)
    has_failed: bool = False

    @property
    def block_ids(self) -> list[int]:
        """The table of the first KV group."""
        return self.tables[0]

    def prefix_after(self, num_tokens: int) -> int:
        while len(self.prefixes) < num_tokens:
            before = self.prefixes[-1] if self.prefixes else root_prefix(self.request.adapter_digest)
            self.prefixes.append(extend_prefix(before, self.token_ids[len(self.prefixes)]))
        return self.prefixes[num_tokens - 1] if num_tokens else root_prefix(self.request.adapter_digest)


class ToyExecutor:
    """Runs a `ToyModel` the way a real executor runs a network, and fails on any wrong plan.

    A slot of the KV cache holds (position, hash of all tokens up to it). Each step reads the whole context of each row
    back through its block table: a wrong table, a stale or early prefix hit, or a wrong num_computed_tokens is an
    AssertionError. Rejected drafts leave their garbage behind, as in a real cache. With look-ahead slots there are
    draft layers too, with a cache of their own that is checked in the same way. Plans that ask for more drafts than a
    request wants, or bring others than those proposed, are noticed.

    Args:
        model_info: limits; its EOS ids are not used, the requests carry their own.
        proposer: drafts; None = never any.
        model: None = the toy model of that vocabulary that never ends by itself.
        failures: request id -> fail the request at its first step with at least that many output tokens.
        before_step: called with each plan, e.g. to hold the engine in a step until a test says so.
        rests: gives the number of next steps without drafts, after each step with drafts; None = never.
        holds: says of a request that has so many output tokens, and would get the next, whether it is held instead
            (BEFORE), or when it has got it (AFTER); None = never.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        proposer: Proposer | None = None,
        *,
        model: ToyModel | None = None,
        failures: Mapping[RequestId, int] | None = None,
        before_step: Callable[[SchedulerOutput], None] | None = None,
        rests: Callable[[], int] | None = None,
        holds: Callable[[RequestId, int], str] | None = None,
    ) -> None:
        self.model_info = model_info
        self.model = model or ToyModel(model_info.vocab_size)
        self._proposer = proposer
        self._failures = dict(failures or {})
        self._before_step, self._rests, self._skip_draft_steps = before_step, rests, 0
        self._holds, self._held = holds, dict[RequestId, str]()
        self._rows: dict[RequestId, _Row] = {}
        self._kv: dict[int, tuple[int, int]] = {}
        self._arrived_drafts: dict[RequestId, list[tuple[int, int]]] = {}
        self._free_rows = list(range(512))
        self.draft_layers = ToyDraftLayers(model_info.speculation, model_info.block_size)
        count = model_info.num_state_snapshots
        self.states = None if count is None else ToyStates(count)
        self.is_shut_down = False
        self.step_ms: Callable[[SchedulerOutput], float] = lambda plan: 1.0  # what it says that a step took
        self.adapters: AdapterReader | None = None
        self._adapter_slots: dict[int, str] = {}
        self.block_store: BlockStore | None = None
        self.grammars: Grammars | None = None
        self.launcher: Launcher | None = None

    @property
    def known_request_ids(self) -> set[RequestId]:
        """Requests it keeps state for."""
        return set(self._rows)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def put_kv(self, block_ids: list[int], begin: int, prefixes: list[int], num_draft_slots: int) -> None:
        """Write KV that was computed elsewhere: of positions from `begin` on, whose prefix hashes these are.

        Args:
            num_draft_slots: the draft layers get it of positions before this one.
        """
        for position, prefix in enumerate(prefixes, begin):
            self._kv[slot_of(block_ids, position, self.model_info.block_size)] = (position, prefix)
        for position, prefix in enumerate(prefixes[: max(num_draft_slots - begin, 0)], begin):
            self.draft_layers.put(block_ids, position, prefix)

    def read_block(self, block_id: int) -> ToyBlock:
        """What the caches hold of a block."""
        first = block_id * self.model_info.block_size
        slots = range(first, first + self.model_info.block_size)
        return tuple(self._kv.get(slot) for slot in slots), self.draft_layers.read_slots(slots)

    def write_block(self, block_id: int, content: ToyBlock) -> None:
        """Overwrite a block."""
        first = block_id * self.model_info.block_size
        self._kv.update({slot: kv for slot, kv in enumerate(content[0], first) if kv is not None})
        self.draft_layers.write_slots({slot: kv for slot, kv in enumerate(content[1], first) if kv is not None})

    def expect_drafts(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Have a request's first step bring drafts that came with its KV."""
        self._arrived_drafts[request_id] = [(token_id, int(DraftSource.HANDED_OVER)) for token_id in token_ids]

    def with_lengths(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan as it runs, once the step before it has: what that gave less moves a row up, and drafts are its own.

        Drafts that were not made are any tokens.
        """
        num_computed, token_ids = plan.num_computed_tokens.copy(), plan.draft.token_ids.copy()
        begun = {new.request.request_id for new in plan.new}
        sources = plan.draft.sources
        for r, request_id in enumerate(plan.request_ids):
            if request_id in begun:
                continue
            row = self._rows[request_id]
            num_computed[r] = min(num_computed[r], len(row.token_ids) - 1)
            begin, end = plan.draft.cu_num_draft[r : r + 2].tolist()
            if MADE_ON_DEVICE not in token_ids[begin:end] or sources is None:
                continue
            assert (token_ids[begin:end] == MADE_ON_DEVICE).all(), "drafts of which some are known"
            made = [token_id for token_id, _ in row.drafted][: end - begin]
            token_ids[begin:end] = made + [0] * (end - begin - len(made))
            row.drafted = list(zip(token_ids[begin:end].tolist(), sources[begin:end].tolist(), strict=True))
        return replace(plan, num_computed_tokens=num_computed, draft=replace(plan.draft, token_ids=token_ids))

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run a plan; see `Executor.execute`.

        Raises:
            AssertionError: the plan, or the cache content it leads to, is wrong.
        """
        assert not self.is_shut_down, "a step after shutdown"
        if self._before_step is not None:
            self._before_step(plan)
        self._apply_changes(plan)
        for r, request_id in enumerate(plan.request_ids):
            self._run_row(self._rows[request_id], plan, r)
        self._run_states(plan)
        prompt_logprobs = self._prompt_logprobs(plan)
        outputs: list[list[int]] = []
        failed: dict[RequestId, tuple[str, str]] = {}
        self._held.clear()
        for r, request_id in enumerate(plan.request_ids):
            outputs.append(self._verify_row(plan, r, failed))
            self._rows[request_id].token_ids += outputs[r]
        num_output = np.array([len(output) for output in outputs], np.int32)
        verified = VerifyResult(
            np.array([token_id for output in outputs for token_id in output], np.int32),
            np.concatenate([[0], num_output.cumsum()]).astype(np.int32),
            np.maximum(num_output - 1, 0).astype(np.int32),
            self._logprobs(plan, outputs),
        )
        drafts = self._propose(plan, outputs)
        timings, skip_draft_steps = {"forward": self.step_ms(plan)}, self._skip_draft_steps
        held = frozenset(self._held)
        return StepResult(
            plan.step_id,
            plan.request_ids,
            verified,
            drafts,
            failed,
            timings,
            skip_draft_steps=skip_draft_steps,
            held=held,
            prompt_logprobs=prompt_logprobs,
        )

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        dropped = []
        for request_id in (*plan.finished_ids, *plan.preempted_ids):
            assert request_id in self._rows, f"{request_id} is dropped, but was not known"
            dropped.append(self._rows.pop(request_id).table_row)
            self.draft_layers.forget(request_id)
            if self.states is not None:
                self.states.forget(request_id)
        self._free_rows += dropped
        for load in plan.adapter_loads:
            used = {row.adapter_slot for row in self._rows.values()}
            assert load.slot not in used, "an adapter is overwritten that a request has"
            assert not isinstance(self.adapters, ToyAdapters) or load.slot not in self.adapters.begun, "a step waits"
            assert 0 <= load.slot < self.model_info.num_adapter_slots, "a place that is not there"
            self._adapter_slots[load.slot] = load.source.adapter.digest
        computed = dict(zip(plan.request_ids, plan.num_computed_tokens.tolist(), strict=True))
        begun = [self._add(new, computed[new.request.request_id]) for new in plan.new]
        self._skip_draft_steps = 0 if begun else self._skip_draft_steps
        if self._proposer is not None:
            self._proposer.forget(np.array(dropped, np.int32))
            self._proposer.begin(begun)
        for delta in plan.deltas:
            tables = self._rows[delta.request_id].tables
            for table, block_ids in zip(tables, self._by_group(delta.new_block_ids, delta.num_blocks), strict=True):
                table.extend(block_ids)
        assert len(set(plan.request_ids)) == len(plan.request_ids) > 0, "a plan without rows, or a request twice"
        assert all(0 <= b < self.model_info.num_blocks for row in self._rows.values() for b in row.block_ids)

    def _by_group(self, block_ids: tuple[int, ...], num_blocks: tuple[int, ...]) -> list[list[int]]:
        """The blocks of each KV group."""
        ends = list(accumulate(num_blocks or (len(block_ids),), initial=0))
        assert (ends[-1], len(ends) - 1) == (len(block_ids), len(self.model_info.groups)), "blocks of no group"
        return [list(block_ids[begin:end]) for begin, end in pairwise(ends)]

    def _add(self, new: NewRequest, num_computed: int) -> DraftRequest:
        request, speculation = new.request, self.model_info.speculation
        method = speculation.method_of(request.speculation)
        assert request.request_id not in self._rows, f"{request.request_id} is new, but was known"
        assert new.token_ids[: new.num_prompt_tokens].tolist() == request.prompt_token_ids.tolist(), "wrong prompt"
        self._rows[request.request_id] = _Row(
            request,
            new.token_ids.tolist(),
            self._by_group(new.block_ids, new.num_blocks),
            new.num_prompt_tokens,
            self._free_rows.pop(),
            new.adapter_slot,
        )
        found = self._adapter_slots[new.adapter_slot] if new.adapter_slot >= 0 else ""
        assert found == request.adapter_digest, f"{request.request_id}: another adapter in its place"
        self._rows[request.request_id].drafted = self._arrived_drafts.pop(request.request_id, [])
        table_row = self._rows[request.request_id].table_row
        if method == speculation.method and speculation.num_lookahead_slots:
            self.draft_layers.begin(request.request_id, num_computed + new.is_draft_ahead)
        return DraftRequest(
            request.request_id,
            table_row,
            new.num_prompt_tokens,
            len(new.token_ids),
            num_computed + new.is_draft_ahead,
            request.cache_salt,
            method,
            prediction_token_ids=request.prediction_token_ids,
        )

    def _slot(self, row: _Row, position: int, g: int = 0) -> int:
        """Of a position in a KV group. Blocks of all groups are of one pool, so a slot is of one group only."""
        block_size = self.model_info.groups[g].block_size
        assert position < len(row.tables[g]) * block_size, f"{row.request.request_id}: no block for {position}"
        block_id = row.tables[g][position // block_size]
        assert block_id >= 0, f"{row.request.request_id}: {position} is read or written outside of the window"
        return block_id * max(group.block_size for group in self.model_info.groups) + position % block_size

    def _run_row(self, row: _Row, plan: SchedulerOutput, r: int) -> None:
        """Check the context in the cache, then write this step's tokens behind it."""
        if row.has_failed:
            return
        start, num_new = int(plan.num_computed_tokens[r]), int(plan.num_new_tokens[r])
        drafts = plan.draft.row(r).tolist()
        end = start + num_new - len(drafts)
        assert num_new >= 1, "a row without tokens"
        assert start < end <= len(row.token_ids), f"tokens [{start}, {end}) of {len(row.token_ids)}"
        assert not drafts or end == len(row.token_ids), "drafts behind an unfinished prompt"
        assert end + len(drafts) <= self.model_info.max_model_len, "tokens past the model's length"
        for g, group in enumerate(self.model_info.groups):
            for position in range(0 if group.window is None else max(start - group.window + 1, 0), start):
                found = self._kv.get(self._slot(row, position, g))
                expected = (position, row.prefix_after(position + 1) + g)
                assert found == expected, f"{row.request.request_id}: KV at {position} is {found}, expected {expected}"
            for position in range(start, end):
                self._kv[self._slot(row, position, g)] = (position, row.prefix_after(position + 1) + g)
            prefix = row.prefix_after(end)
            for position, draft in enumerate(drafts, end):
                prefix = extend_prefix(prefix, draft)
                self._kv[self._slot(row, position, g)] = (position, prefix + g)
        proposed = row.drafted[: len(drafts)]
        assert _rows_of(plan.draft)[r] == proposed, f"{row.request.request_id}: drafts {drafts}, not {proposed}"

    def _run_states(self, plan: SchedulerOutput) -> None:
        """Move the recurrent states on, where the model has some."""
        if self.states is None:
            assert plan.states is None, "states of a model without any"
        else:
            rows = {name: self._rows[name] for name in plan.request_ids}
            digests = {name: row.request.adapter_digest for name, row in rows.items()}
            self.states.run(plan, {name: row.token_ids for name, row in rows.items()}, digests)

    def _verify_row(self, plan: SchedulerOutput, r: int, failed: dict[RequestId, tuple[str, str]]) -> list[int]:
        """Sample the target at each logits row; keep drafts while they are the same token."""
        request_id = plan.request_ids[r]
        row, drafts = self._rows[request_id], plan.draft.row(r).tolist()
        if row.has_failed:
            return []
        if plan.num_computed_tokens[r] + plan.num_new_tokens[r] - len(drafts) < len(row.token_ids):
            return []
        num_output = len(row.token_ids) - row.num_prompt_tokens
        if num_output >= self._failures.get(request_id, 1 << 62):
            failed[request_id] = ("InternalError", "non-finite logits")
            row.has_failed = True
            return []
        if self._holds is not None and (held := self._holds(request_id, num_output)):
            self._held[request_id] = held
            if held == BEFORE:
                return []
        prefix = row.prefix_after(len(row.token_ids))
        output: list[int] = []
        for draft in [*drafts, None]:
            token_id = self.model.next_token(row.request, prefix, num_output + len(output))
            output.append(token_id)
            if token_id != draft:
                break
            prefix = extend_prefix(prefix, token_id)
        return output

    def _logprobs(self, plan: SchedulerOutput, outputs: list[list[int]]) -> LogprobArrays | None:
        wanted = [self._rows[request_id].request.sampling.logprobs for request_id in plan.request_ids]
        if all(count is None for count in wanted):
            return None
        token_ids = np.array([token_id for output in outputs for token_id in output], np.int32)
        return toy_logprobs(token_ids, max(count or 0 for count in wanted), self.model_info.vocab_size)

    def _prompt_logprobs(self, plan: SchedulerOutput) -> dict[RequestId, LogprobArrays]:
        """Those of the prompt tokens that follow the tokens of this step."""
        found: dict[RequestId, LogprobArrays] = {}
        for r, request_id in enumerate(plan.request_ids):
            row, begin = self._rows[request_id], int(plan.num_computed_tokens[r]) + 1
            wanted = row.request.sampling.prompt_logprobs
            end = min(begin + int(plan.num_new_tokens[r]), row.num_prompt_tokens)
            if wanted is not None and len(row.token_ids) == row.num_prompt_tokens and begin < end:
                token_ids = np.array(row.token_ids[begin:end], np.int32)
                found[request_id] = toy_logprobs(token_ids, wanted, self.model_info.vocab_size)
        return found

    def _propose(self, plan: SchedulerOutput, outputs: list[list[int]]) -> DraftTokens:
        rows = [self._rows[request_id] for request_id in plan.request_ids]
        limits = [self._max_draft_len(plan, r, row, len(outputs[r])) for r, row in enumerate(rows)]
        if self._proposer is None:
            return DraftTokens.none(len(rows))
        if self._skip_draft_steps:
            self._skip_draft_steps -= 1
            return DraftTokens.none(len(rows))
        if self._rests is not None:
            self._skip_draft_steps = self._rests()
        max_draft_len = np.array(limits, np.int32)
        table_rows = np.array([row.table_row for row in rows], np.int32)
        num_tokens = np.array([len(row.token_ids) for row in rows], np.int32)
        table = np.zeros((table_rows.max() + 1, num_tokens.max()), np.int32)
        for row in rows:
            table[row.table_row, : len(row.token_ids)] = row.token_ids
        wanted = [row.request.speculation.num_draft_logprobs for row in rows]
        num_logprobs = np.array([-1 if count is None else count for count in wanted], np.int32)
        x = ProposeInput(plan.request_ids, table_rows, table, num_tokens, max_draft_len, num_logprobs)
        drafts = self._proposer.propose(x)
        assert (np.diff(drafts.cu_num_draft) <= max_draft_len).all(), "the proposer exceeded max_draft_len"
        for row, drafted in zip(rows, _rows_of(drafts), strict=True):
            row.drafted = drafted
        return drafts

    def _max_draft_len(self, plan: SchedulerOutput, r: int, row: _Row, num_output: int) -> int:
        """Check what the plan allows, let the draft layers run, and return what can be drafted."""
        planned, info, request = int(plan.max_draft_len[r]), self.model_info.speculation, row.request
        wish = request.speculation.num_speculative_tokens
        limit = 0 if info.method_of(request.speculation) == "naive" else min(wish or 1 << 30, info.max_draft_tokens)
        assert 0 <= planned <= limit, f"{request.request_id}: {planned} drafts planned, {limit} wanted"
        if row.has_failed or self._held.get(request.request_id) == BEFORE:
            return 0
        assert planned == 0 or num_output, f"{request.request_id}: drafts behind an unfinished prompt"
        num_tokens, num_computed = len(row.token_ids), int(plan.num_computed_tokens[r])
        # After accepted drafts there may be less room than the plan saw.
        planned = max(min(planned, row.num_prompt_tokens + request.max_tokens - num_tokens - 1), 0)
        num_valid = num_tokens - 1 if num_output else num_computed + int(plan.num_new_tokens[r])
        row.prefix_after(num_tokens)
        return self.draft_layers.run(
            request.request_id, row.block_ids, row.prefixes, num_valid, planned if num_output else 0
        )


def _rows_of(drafts: DraftTokens) -> list[list[tuple[int, int]]]:
    """(token, source) of every draft, by row."""
    sources = np.zeros(len(drafts.token_ids), np.int8) if drafts.sources is None else drafts.sources
    pairs = list(zip(drafts.token_ids.tolist(), sources.tolist(), strict=True))
    return [pairs[begin:end] for begin, end in pairwise(drafts.cu_num_draft.tolist())]
