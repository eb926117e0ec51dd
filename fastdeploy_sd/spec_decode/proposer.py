"""The interface of drafting methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.types import EMPTY_I32, F32, I32, DraftSource, DraftTokens, RequestId, Rows, StepView

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig
    from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel


def _no_method(name: str) -> Proposer:
    raise InternalError(f"other_method: expected a dispatcher, which has methods, got a request for {name!r}")


OverRanks = Callable[[str, "Proposer"], "Proposer"]


def keep_local(name: str, proposer: Proposer) -> Proposer:
    return proposer


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a method is made from.

    Attributes:
        max_num_seqs, max_model_len: rows and columns of the token table.
        draft_models: those that are loaded, by method. A method that chooses draws from the first.
        other_method: another method of the server, by name, for one that chooses among them.
        over_ranks: makes a method that runs a model, given its name, run on all ranks.
        per_request_methods: in the order in which they are asked.
    """

    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    draft_models: Mapping[str, LoadedDraftModel] = field(default_factory=dict)
    step_stats: StepStats = field(default_factory=StepStats)
    other_method: Callable[[str], Proposer] = field(default=_no_method)
    over_ranks: OverRanks = keep_local
    per_request_methods: tuple[PerRequestMethod, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that a method drafts for, from `begin` until its table row is forgotten.

    Attributes:
        num_prompt_tokens: the first tokens of the row; what follows is output.
        num_tokens: tokens in the row now; more than the prompt when the request comes back after preemption.
        num_draft_slots: leading KV slots of the draft layers that are filled. They end with a block, or one token past
            those that the target has run: then the hidden row before the next slot comes with the next step.
        cache_salt, adapter_digest: drafts learned from a request are used only for requests with the same ones.
        end_token_ids, min_tokens: output token n, from 1, is the last one if it is one of these ids and
            n >= min_tokens. The row may have tokens after it for a step: accepted drafts are committed uncut.
        prediction_token_ids: i32[n], the client's predicted output.
    """

    request_id: RequestId
    table_row: int
    num_prompt_tokens: int
    num_tokens: int
    num_draft_slots: int = 0
    cache_salt: str = ""
    method: str = ""
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    is_guided: bool = False
    prediction_token_ids: I32 = field(default_factory=lambda: EMPTY_I32, compare=False)
    adapter_digest: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TargetStep(StepView):
    """What the target model ran in the step just verified; for methods that run a model.

    Attributes:
        query_start_loc: i32[R+1], row r ran tokens [q[r], q[r+1]) of the step; the first need not be 0.
        num_computed_tokens: i32[R], the position of each row's first token.
        num_valid: i32[R]: hidden rows of positions num_computed_tokens[r] .. num_valid[r] - 1 belong to committed
            tokens; none for a row that failed.
        num_kv_slots: i32[R], tokens that the row's blocks hold, num_valid[r] .. max_model_len.
    """

    query_start_loc: I32
    num_computed_tokens: I32
    num_valid: I32
    num_kv_slots: I32


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbabilities:
    """Asks a method that runs a model how probable its drafts are under that model.

    Attributes:
        min_survival: f32[R] >= 0: a row's drafts end when their joint probability falls below it.
        draft_prob: f32[D], room for every draft that the method may return, which it writes.
        max_drafts: i32[R], drafts of a row's tree at most; max_draft_len says how many follow each other.
    """

    min_survival: F32
    draft_prob: F32
    max_drafts: I32


@dataclass(frozen=True, slots=True, eq=False)
class ProposeInput(StepView):
    """The input of every method, after a step was verified. Row r is request_ids[r] everywhere.

    A later step has the same object only if its requests and table rows are the same; the arrays hold the new values.

    Attributes:
        table_rows: i32[R], the row of token_table. A request keeps its row until that is forgotten.
        token_table: i32[num_table_rows, max_model_len]: prompt, earlier output, and this step's output last.
        num_tokens: i32[R], committed tokens of each row.
        max_draft_len: i32[R], the longest draft allowed, `prefix` not counted; 0 for a row that failed, has an
            unfinished prompt or belongs to another method.
        num_draft_logprobs: i32[R], alternatives wanted with every draft's log-probability, -1 or None = not wanted.
        prefix: drafts of another method; the returned drafts follow them.
        target: what the model ran; None for a method that writes no KV slots.
        probabilities: where to write them. A method without a model ignores it.
    """

    request_ids: tuple[RequestId, ...]
    table_rows: I32
    token_table: I32
    num_tokens: I32
    max_draft_len: I32
    num_draft_logprobs: I32 | None = None
    prefix: DraftTokens | None = None
    target: TargetStep | None = None
    probabilities: DraftProbabilities | None = None

    def select(self, rows: Rows) -> ProposeInput:
        """Return rows intp[n], rising, for a method that runs no model: without `target`, whose rows are ragged."""
        return ProposeInput(
            request_ids=tuple(self.request_ids[r] for r in rows.tolist()),
            table_rows=self.table_rows[rows],
            token_table=self.token_table,
            num_tokens=self.num_tokens[rows],
            max_draft_len=self.max_draft_len[rows],
            num_draft_logprobs=None if self.num_draft_logprobs is None else self.num_draft_logprobs[rows],
            prefix=None if self.prefix is None else self.prefix.take(rows),
        )

    def slice(self, begin: int, end: int) -> ProposeInput:
        """Return rows begin .. end - 1 only, with what the model ran of them."""
        target = self.target
        if target is not None:
            # Offsets into the step's hidden rows stay: these do not move.
            target = TargetStep(
                query_start_loc=target.query_start_loc[begin : end + 1],
                num_computed_tokens=target.num_computed_tokens[begin:end],
                num_valid=target.num_valid[begin:end],
                num_kv_slots=target.num_kv_slots[begin:end],
            )
        return replace(self.select(np.arange(begin, end)), target=target)


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep(StepView):
    """An in-flight step, whose output the host does not know yet. Row r is that of the step everywhere.

    Attributes:
        table_rows: i32[R].
        num_computed, num_new: i32[R], tokens before the step (at most, where the row `follows`), and those that it
            runs.
        max_output: i32[R], output tokens at most; 0 where the prompt is unfinished.
        max_tokens: i32[R], committed tokens afterwards at most.
        max_draft_len, sure_draft_len: i32[R], the longest draft allowed, and that allowed after max_output tokens.
        num_kv_slots: i32[R], as TargetStep's.
        follows: bool[R], whether the step before it, also in flight, has the row.
    """

    table_rows: I32
    num_computed: I32
    num_new: I32
    max_output: I32
    max_tokens: I32
    max_draft_len: I32
    sure_draft_len: I32
    num_kv_slots: I32
    follows: npt.NDArray[np.bool_]


class AsyncDrafter(Protocol):
    """Drafts on the device, after a step whose tokens the host does not know yet; the next step reads them there."""

    def start(self, step: PendingStep) -> None:
        """Start to draft after the step that was started last."""
        ...

    def finish(self, x: ProposeInput) -> DraftTokens:
        """Return the drafts that `start` made, now that the tokens are known; in the order of the steps.

        A row that was dropped since has a `target.num_valid` of 0. Each id is MADE_ON_DEVICE.
        """
        ...

    def restart(self) -> None:
        """Forget the started steps, and send the host's state to the device."""
        ...


@runtime_checkable
class DraftsAsync(Protocol):
    """A proposer that may draft ahead."""

    @property
    def async_drafter(self) -> AsyncDrafter | None:
        """The drafter for some of its steps; constant, None = none."""
        ...

    def is_async(self, table_rows: I32) -> bool:
        """Whether a step of these rows, i32[n], can be drafted for ahead."""
        ...


class Proposer(Protocol):
    """A drafting method. State, if any, is keyed by table row.

    In every step the worker calls `forget` for rows whose request ended or was preempted, and `begin` for requests that
    got a row. After the model's output was committed, it calls `propose` for all rows of the step.
    """

    @property
    def num_lookahead_slots(self) -> int:
        """KV slots that `propose` writes, from a request's newest token on; constant."""
        return 0

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Prepare for requests that will be in the next step; their table rows are not in use."""
        return

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Draft what follows each row's committed tokens and `x.prefix`; called for every step, to keep state.

        Returns:
            At most `max_draft_len[r]` drafts in row r, as a chain. Fewer or none is always right: a method must not
            pad. The same history gives the same drafts. They need not name their source (see DraftGuard).

        Raises Exception: some row cannot be drafted for. The rows are then tried apart, so no state may have changed,
        except of a row that is given up: it gets no more drafts.
        """
        ...

    def forget(self, table_rows: I32) -> None:
        """Drop the state of these table rows, i32[n]; those without any are ignored."""
        return

    def close(self) -> None:
        """Save what a later server can use. May be called twice."""
        return


class PerRequestMethod(Protocol):
    """Drafts for some requests only, as a `Proposer` without a model; its source and what drafts.

    It sees only rows of requests that it serves, with the drafts of the methods before it as `ProposeInput.prefix`.
    """

    @property
    def source(self) -> DraftSource: ...

    @property
    def proposer(self) -> Proposer: ...

    @property
    def is_certain(self) -> bool:
        """Whether its drafts are always accepted. A method that chooses then takes them as certain; else it asks the
        proposer's `native_drafter` along with its own drafters.
        """
        ...

    def serves(self, request: DraftRequest) -> bool: ...


MakeProposer = Callable[["SpeculativeConfig", ProposerContext], Proposer]
