"""The interface of drafting methods. Knows no method, scheduler or verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.types import EMPTY_I32, F32, I32, DraftSource, DraftTokens, RequestId, StepView

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig
    from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel


def _no_method(name: str) -> Proposer:
    raise InternalError(f"other_method: expected a dispatcher, which has methods, got a request for {name!r}")


OverRanks = Callable[[str, "Proposer"], "Proposer"]


def keep_local(name: str, proposer: Proposer) -> Proposer:
    """Return the method as it is: there is one rank."""
    return proposer


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """The surroundings a method is made for.

    Attributes:
        max_num_seqs: table rows 0 .. max_num_seqs - 1.
        max_model_len: columns of the token table.
        vocab_size: token ids are below it.
        draft_models: those that are loaded, by method. A method that chooses draws from the first.
        board: where a method that chooses finds what steps take, and says what it chose.
        other_method: another method of the server, by name, for one that chooses among them.
        over_ranks: makes a method that runs a model, given its name, run on all ranks.
        per_request_methods: sources of drafts that only some requests have, in the order in which they are asked.
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
    """A request that a method will see in the steps to come, from `begin` until its table row is forgotten.

    Attributes:
        table_row: its row of the token table.
        num_prompt_tokens: the first tokens of the row; what follows is output.
        num_tokens: tokens in the row now; more than the prompt when the request comes back after preemption.
        num_draft_slots: leading KV slots of the draft layers that are filled. They end with a block, or one token past
            those that the target has run: then the hidden row before the next slot comes with the next step.
        cache_salt: nothing learnt from a request may be used for one with another salt.
        method: which method it chose, resolved; matters to the dispatcher only.
        end_token_ids, min_tokens: output number n, from 1, is its last one when it is one of these ids and
            n >= min_tokens. The row may go on after it for a step: accepted drafts are committed uncut.
        is_guided: whether it has a grammar.
        prediction_token_ids: i32[n], what the client expects the output to be; of no concern to methods.
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


@dataclass(frozen=True, slots=True, eq=False)
class TargetStep(StepView):
    """What the target model ran in the step just verified; for methods that run a model themselves.

    Attributes:
        query_start_loc: i32[R+1], row r ran tokens [q[r], q[r+1]) of the step; the first need not be 0.
        num_computed_tokens: i32[R], the position of each row's first token.
        num_valid: i32[R]: hidden rows of positions num_computed_tokens[r] .. num_valid[r] - 1 belong to committed
            tokens. Those of rejected drafts follow; for a row that failed none is valid.
        num_kv_slots: i32[R], tokens that the row's blocks hold, at most max_model_len; at least num_valid[r], not
            always one more.
    """

    query_start_loc: I32
    num_computed_tokens: I32
    num_valid: I32
    num_kv_slots: I32


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbabilities:
    """Asks a method that runs a model how probable its drafts are under that model.

    Attributes:
        min_survival: f32[R] >= 0: a row gets no more drafts when those that it has are less probable together.
        draft_prob: f32[D], room for every row's max_draft_len; the method writes that of each draft that it returns.
    """

    min_survival: F32
    draft_prob: F32


@dataclass(frozen=True, slots=True, eq=False)
class ProposeInput(StepView):
    """What any method may look at, after a step was verified. Row r is request_ids[r] everywhere.

    The same value comes again for a later step only where the requests and their table rows are the same; its arrays
    hold what that step brought.

    Attributes:
        table_rows: i32[R], the row of token_table. A request keeps its row until that is forgotten.
        token_table: i32[num_table_rows, max_model_len]: prompt, earlier output, and this step's output last.
        num_tokens: i32[R], committed tokens of each row.
        max_draft_len: i32[R], the longest draft allowed, `prefix` not counted; 0 for a row whose prompt is unfinished
            or that failed, and for rows that belong to another method.
        num_draft_logprobs: i32[R], alternatives wanted with every draft's log-probability, -1 = not wanted;
            None = no request wants any.
        prefix: drafts that another method made already; what is returned follows them. None = there are none.
        target: what the model ran; None where no model runs, and for a method that writes no KV slots.
        probabilities: asked for; None = no request wants any. A method without a model does not look at it.
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


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep(StepView):
    """A step that runs on a device, whose output the host does not know yet. Row r is that of the step everywhere.

    Attributes:
        table_rows: i32[R].
        num_computed, num_new: i32[R], tokens before the step, and those that it runs; `num_computed` is the most there
            can be where the row `follows`.
        max_output: i32[R], output tokens at most; 0 where the prompt is unfinished.
        max_tokens: i32[R], committed tokens afterwards at most.
        max_draft_len, sure_draft_len: i32[R], the longest draft allowed, and what is allowed if all those tokens come.
        num_kv_slots: i32[R], as TargetStep's.
        follows: bool[R], whether the step before it, which is not over either, has the row too.
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
        """Start to draft after the step that was started last.

        Raises:
            Exception: it could not be started.
        """
        ...

    def finish(self, x: ProposeInput) -> DraftTokens:
        """Note what `start` has made, now that the tokens are known; in the order of the steps.

        Args:
            x: of that step; a row that was dropped since has a `target.num_valid` of 0.

        Returns:
            The drafts, with MADE_ON_DEVICE for each id.
        """
        ...

    def restart(self) -> None:
        """Forget what was started: the device has to be sent what the host knows."""
        ...


@runtime_checkable
class DraftsAsync(Protocol):
    """A proposer that may draft ahead."""

    @property
    def async_drafter(self) -> AsyncDrafter | None:
        """What does so, for some of its steps; constant, None = nothing."""
        ...

    def is_async(self, table_rows: I32) -> bool:
        """Whether a step of these rows, i32[n], can be drafted for ahead."""
        ...


class Proposer(Protocol):
    """A drafting method. State, if any, is keyed by table row.

    The worker calls, step after step: `forget` for rows whose request ended or was preempted, `begin` for requests
    that got a row, then, after the model ran and its output was committed, `propose` for all rows of the step.
    What a method has no use for it inherits: it then writes no KV, keeps no state and saves nothing.
    """

    @property
    def num_lookahead_slots(self) -> int:
        """KV slots from a request's newest token on that `propose` writes; 0 = it writes none. Constant."""
        return 0

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Prepare for requests that will be in the next step; their table rows are not in use."""
        return

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Guess what follows each row's committed tokens and `x.prefix`.

        Called for every step, also when no row may be drafted for: a method keeps its state up to date in it.

        Returns:
            At most `max_draft_len[r]` drafts in row r. Fewer or none is always right: a method that does not know
            must not pad. The same history gives the same drafts. They need not name their source (see DraftGuard), and
            must be a chain.

        Raises:
            Exception: some row cannot be drafted for. The rows are then tried apart, so that nothing may have changed,
                unless a row whose state has changed is given up: no drafts follow for it.
        """
        ...

    def forget(self, table_rows: I32) -> None:
        """Drop the state of these table rows, i32[n]; those without any are ignored."""
        return

    def close(self) -> None:
        """The server ends: save what should outlive it. May be called twice."""
        return


class PerRequestMethod(Protocol):
    """Drafts for some requests only; what it does for these is that of `Proposer`, and it runs no model.

    It sees no rows but those of requests that it serves, and `ProposeInput.prefix` of who is asked before it. One that
    has nothing for a row in this step drafts nothing there: the next one is asked.
    """

    @property
    def source(self) -> DraftSource:
        """Of its drafts."""
        ...

    @property
    def proposer(self) -> Proposer:
        """What drafts; it writes no KV."""
        ...

    @property
    def is_certain(self) -> bool:
        """Whether its drafts are right without fail. A method that chooses takes them for certain then; else it gets
        none, but asks `native_drafter`, which the proposer has then, besides its own."""
        ...

    def serves(self, request: DraftRequest) -> bool:
        """Whether it may have drafts for the request."""
        ...


MakeProposer = Callable[["SpeculativeConfig", ProposerContext], Proposer]
