"""A step: the plan from scheduler to worker, its arrays, and the result on its way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from fastdeploy_sd.types.adapters import AdapterLoad
from fastdeploy_sd.types.arrays import EMPTY_I32, F32, I32, U64, Rows, merge_rows, offsets, take_rows
from fastdeploy_sd.types.drafts import DraftTokens, LogprobArrays, concat_logprobs
from fastdeploy_sd.types.requests import Request, RequestId
from fastdeploy_sd.types.states import StatePlan


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well the drafts of one source were judged.

    Attributes:
        num_scored: drafts compared with the text, verified or not, each after those before it were right.
        expected, observed: how many of them should have been right, and were.
        squared_error: the sum of the squared differences between a draft's probability and what became of it.
    """

    num_scored: int = 0
    expected: float = 0.0
    observed: int = 0
    squared_error: float = 0.0


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """Totals since the start, but for `gain` and `reason`.

    Attributes:
        gain: tokens per second over those of plain decoding in the latest steps; 0 = not known yet.
        reason: why the latest step got no drafts, a key of `num_steps`; "" = it got some.
        num_steps: what was decided -> steps: `drafts`, or why there are none: `low_gain` (none is worth its time),
            `load` (none can be, with so many rows), `request` (no request allows any), `no_drafter` (no source offers
            any), `comparison` (a plain step to compare with).
        predicted_s, measured_s: time of the steps for which it was predicted.
        calibrations: DraftSource name in lower case -> how well its drafts were judged.
    """

    gain: float = 0.0
    reason: str = ""
    num_steps: dict[str, int] = field(default_factory=dict)
    predicted_s: float = 0.0
    measured_s: float = 0.0
    calibrations: dict[str, Calibration] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """First sight of a request for the worker, also when it comes back after preemption.

    Attributes:
        token_ids: i32[n], the prompt and then the committed output so far.
        block_ids: of its KV groups, one group after the other; -1 where a group needs no block.
        num_blocks: how many of them are of each group; () = there is one group.
        is_draft_ahead: draft layers have the KV of one token more than the target; see KvArrival.
        adapter_slot: the place of its adapter, -1 = it has none.
    """

    request: Request
    token_ids: I32
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    is_draft_ahead: bool = False
    num_blocks: tuple[int, ...] = ()
    adapter_slot: int = -1


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """Blocks appended to the table of a request that the worker knows; groups as in NewRequest.

    The worker is not told of blocks before the attention window: no later token attends to them.
    """

    request_id: RequestId
    new_block_ids: tuple[int, ...]
    num_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """One step's plan. Row r is request_ids[r] in every array.

    Attributes:
        new: requests the worker has not seen, or has forgotten after preemption.
        deltas: known requests whose block table grew.
        num_computed_tokens: i32[R], tokens whose KV is already in the cache.
        num_new_tokens: i32[R] >= 1, tokens to run now, drafts included.
        draft: the drafts among them; row r's are its last `num_draft[r]` new tokens.
        max_draft_len: i32[R], how many drafts the proposer may return for the next step.
        finished_ids, preempted_ids: requests whose worker state must be dropped before this step.
        num_prompt_tokens_ahead: of prompts that the next step probably holds; 0 where nothing drafts.
        states: None = the model has no recurrent state.
        adapter_loads: adapters that new requests need and the worker does not have in their place.
    """

    step_id: int
    request_ids: tuple[RequestId, ...]
    new: tuple[NewRequest, ...]
    deltas: tuple[RequestDelta, ...]
    num_computed_tokens: I32
    num_new_tokens: I32
    draft: DraftTokens
    max_draft_len: I32
    finished_ids: tuple[RequestId, ...] = ()
    preempted_ids: tuple[RequestId, ...] = ()
    num_prompt_tokens_ahead: int = 0
    states: StatePlan | None = None
    adapter_loads: tuple[AdapterLoad, ...] = ()

    def take(self, rows: Rows) -> SchedulerOutput:
        """Return the plan of some rows, intp[n] ascending. It has no new and no finished requests."""
        return replace(
            self,
            request_ids=tuple([self.request_ids[r] for r in rows.tolist()]),
            new=(),
            deltas=(),
            num_computed_tokens=self.num_computed_tokens[rows],
            num_new_tokens=self.num_new_tokens[rows],
            draft=self.draft.take(rows),
            max_draft_len=self.max_draft_len[rows],
            finished_ids=(),
            preempted_ids=(),
            states=None if self.states is None else self.states.take(rows),
            adapter_loads=(),
        )

    def with_lengths(self, num_tokens: I32) -> SchedulerOutput:
        """Return the plan over i32[R] committed tokens: a row starts at its newest one at the latest."""
        return replace(self, num_computed_tokens=np.minimum(self.num_computed_tokens, num_tokens - 1))


class StepView:
    """Base of dataclasses over memory that the next step writes again; `kept` returns one to keep."""

    __slots__ = ()

    def kept(self) -> Self:
        """Return a copy that holds: of every array, and of every view in it."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        copies = {name: _kept(part) for name, part in parts.items() if isinstance(part, (np.ndarray, StepView))}
        return replace(self, **copies)  # type: ignore[type-var]


def _kept(part: Any) -> Any:
    return part.kept() if isinstance(part, StepView) else part.copy()


@dataclass(frozen=True, slots=True, eq=False)
class SamplingArrays:
    """Sampling parameters as columns of the request table; request r of the step is row table_rows[r] of each, of S.

    Attributes:
        table_rows: i32[R].
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: f32[S].
        top_k: i32[S], 0 = off. seed: u64[S]. num_logprobs: i32[S], -1 = not asked for.
        count_rows: i32[S], row of token_counts, -1 = no penalty applies to the request.
        token_counts: i32[num_count_rows, V]: bits 0..29 count the token in the output, bit 30 says it is in the prompt.
        num_bias, bias_token_ids, bias_values: i32[S], i32[S, B], f32[S, B]; the first num_bias of a row hold.
        cu_mask, mask_token_ids: i32[L+1], i32[K] tokens forbidden per logits row (bad words, min_tokens).
        allowed_rows, allowed_bits: i32[L], i32[M, W >= ceil(V/32)] tokens that a grammar allows per logits row: bit
            i % 32 of word i / 32 in the row's row of allowed_bits; -1 = all.
    """

    table_rows: I32
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    repetition_penalty: F32
    presence_penalty: F32
    frequency_penalty: F32
    seed: U64
    num_logprobs: I32
    count_rows: I32
    token_counts: I32
    num_bias: I32
    bias_token_ids: I32
    bias_values: F32
    cu_mask: I32
    mask_token_ids: I32
    allowed_rows: I32
    allowed_bits: I32


@dataclass(frozen=True, slots=True, eq=False)
class VerifyResult(StepView):
    """Output tokens of a step: per row the accepted drafts, then one recovered or bonus token.

    A row's drafts are a tree, its root the newest committed token. The accepted ones are a path from there.

    Attributes:
        token_ids: i32[O].
        cu_num_output: i32[R+1]; a row has num_accepted + 1 tokens, 0 while its prompt is unfinished.
        num_accepted: i32[R].
        logprobs: None when no request of the step asked; holds for longer than the step.
        nodes: i32[O], what each output token was drawn after: draft nodes[o] - 1 of its row, 0 = none of them; None =
            0, 1, 2 ... in each row, as of chains.
    """

    token_ids: I32
    cu_num_output: I32
    num_accepted: I32
    logprobs: LogprobArrays | None = None
    nodes: I32 | None = None

    def take(self, rows: Rows) -> VerifyResult:
        """Return some rows, intp[n] rising."""
        index, cu = take_rows(self.cu_num_output, rows)
        logprobs = None if self.logprobs is None else self.logprobs.take(index)
        nodes = None if self.nodes is None else self.nodes[index]
        return VerifyResult(self.token_ids[index], cu, self.num_accepted[rows], logprobs, nodes)

    @staticmethod
    def merge(num_rows: int, parts: Sequence[tuple[Rows, VerifyResult]]) -> VerifyResult:
        """Put the output of parts of a step together: row i of a part is row rows[i]; the others have no output."""
        if not parts:
            return VerifyResult(EMPTY_I32, offsets(np.zeros(num_rows)), np.zeros(num_rows, np.int32))
        order, cu = merge_rows(num_rows, [(rows, part.cu_num_output) for rows, part in parts])
        logprobs = concat_logprobs([(len(part.token_ids), part.logprobs) for _, part in parts])
        num_accepted = np.zeros(num_rows, np.int32)
        for rows, part in parts:
            num_accepted[rows] = part.num_accepted
        token_ids = np.concatenate([part.token_ids for _, part in parts])[order]
        nodes = None
        if any(part.nodes is not None for _, part in parts):
            nodes = np.concatenate([_nodes_of(part) for _, part in parts])[order]
        return VerifyResult(token_ids, cu, num_accepted, None if logprobs is None else logprobs.take(order), nodes)

    def accepted(self, r: int) -> list[int]:
        """The accepted drafts of row r, counted from its first."""
        if self.nodes is None:
            return list(range(int(self.num_accepted[r])))
        begin, end = self.cu_num_output[r : r + 2].tolist()
        accepted: list[int] = (self.nodes[begin + 1 : end] - 1).tolist()
        return accepted

    def row(self, r: int) -> I32:
        return self.token_ids[self.cu_num_output[r] : self.cu_num_output[r + 1]]


def _nodes_of(result: VerifyResult) -> I32:
    if result.nodes is not None:
        return result.nodes
    begins = np.repeat(result.cu_num_output[:-1], np.diff(result.cu_num_output))
    return np.arange(len(result.token_ids), dtype=np.int32) - begins


@dataclass(frozen=True, slots=True, eq=False)
class StepResult(StepView):
    """What the worker returns. Rows follow the plan's request_ids. Its drafts hold for longer than the step.

    Attributes:
        drafts: for the next step, at most max_draft_len[r] in row r, with room for one token after them.
        failed: requests whose computation broke -> `RequestOutput.error`; their rows carry no output.
        timings_ms: e.g. {"batch": .., "forward": .., "verify": .., "draft": ..}.
        choice: of a drafting method that chooses by itself.
        skip_draft_steps: in so many of the next steps nothing is drafted, unless one has a new request.
        held: requests that no step may have until `Grammars.take_masked` names them. A row that came too early carries
            no output: it runs the same tokens again.
        prompt_logprobs: of the prompt tokens after those that the step ran, for requests that asked. They hold for
            longer than the step.
        embeddings: f32[H] of prompts that the step ended, for requests that asked; they hold for longer, too.
    """

    step_id: int
    request_ids: tuple[RequestId, ...]
    verified: VerifyResult
    drafts: DraftTokens
    failed: Mapping[RequestId, tuple[str, str]] = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    choice: ChoiceReport | None = None
    skip_draft_steps: int = 0
    held: frozenset[RequestId] = frozenset()
    prompt_logprobs: Mapping[RequestId, LogprobArrays] = field(default_factory=dict)
    embeddings: Mapping[RequestId, F32] = field(default_factory=dict)

    def take(self, rows: Rows) -> StepResult:
        """Return the result of some rows, intp[n] rising."""
        request_ids = tuple([self.request_ids[r] for r in rows.tolist()])
        return replace(
            self,
            request_ids=request_ids,
            verified=self.verified.take(rows),
            drafts=self.drafts.take(rows),
            failed={request_id: self.failed[request_id] for request_id in request_ids if request_id in self.failed},
            held=self.held.intersection(request_ids),
            prompt_logprobs={name: self.prompt_logprobs[name] for name in request_ids if name in self.prompt_logprobs},
            embeddings={name: self.embeddings[name] for name in request_ids if name in self.embeddings},
        )
