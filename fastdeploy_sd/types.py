"""Every value that crosses a package border. NumPy only; nothing here knows Paddle, sockets or HTTP.

Dimension letters: R requests, T tokens of a step, L logits rows, D drafts, O outputs, V vocabulary, H hidden size.
`cu_*` arrays have n+1 entries, start at 0 and never decrease.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.sampling_params import SamplingParams

RequestId = str
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
I8 = npt.NDArray[np.int8]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

EMPTY_I32: I32 = np.zeros(0, np.int32)


class DraftSource(enum.IntEnum):
    """Who guessed a draft. The lower-case name is the label in metrics."""

    CUSTOM = 0
    NGRAM = 1
    SUFFIX = 2
    MTP = 3


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# ---- frontend -> engine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request says about drafting. The defaults leave everything to the server's configuration.

    Attributes:
        enabled: False = no drafts for this request.
        method: one of `SpeculationInfo.methods`; None = the server's.
        num_speculative_tokens: drafts per step at most, 1 .. `SpeculationInfo.max_draft_tokens`; None = the server's.
        num_draft_logprobs: alternatives to report beside the log-probability of every judged draft; None = report none.
    """

    enabled: bool = True
    method: str | None = None
    num_speculative_tokens: int | None = None
    num_draft_logprobs: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence to generate; a user's request with n > 1 becomes n of these. Validated: nothing is checked again.

    Attributes:
        prompt_token_ids: i32[P], P >= 1.
        max_tokens: resolved limit on generated tokens, >= 1; P + max_tokens <= ModelInfo.max_request_tokens.
        seed: resolved, so that `philox(seed, position)` is defined also when the user gave none.
        eos_token_ids: ids that end the request unless `sampling.ignore_eos`.
        bad_words_token_ids: each sequence may not be completed; built from `sampling.bad_words` by the frontend.
        priority: lower runs first; ties by arrival.
        arrival_time: seconds since the epoch.
        cache_salt: requests share prefix blocks, and outputs to draft from, only with the same salt.
        speculation: validated against the model's SpeculationInfo.
    """

    request_id: RequestId
    prompt_token_ids: I32
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    speculation: Speculation = Speculation()


# ---- engine -> frontend ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one generated token and of its best alternatives (natural log, of the raw logits).

    Attributes:
        rank: 1 for the most likely token.
        top_token_ids, top_logprobs: the `sampling.logprobs` best, best first; may or may not hold token_id.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftLogprob:
    """A judged draft and how sure its method was of it.

    Attributes:
        draft: log-probability under the drafting model, and its alternatives.
        position: 0 for the first draft of its step.
        accepted: whether it became output; a right draft behind the token that ended the request did not.
    """

    draft: TokenLogprob
    position: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What verification did with drafts. Entry i of a tuple is about the draft at position i of its step.

    Drafts behind the token that ended the request count in no tuple: whether they were right made no difference. So
    an accepted draft is one that became output.

        drafts     a  b  c  d                all of them right, b ends the request
        output     a  b                      num_emitted 2, drafted, reached and accepted (1, 1)

    Attributes:
        num_verifications: steps that judged at least one draft of the request.
        num_emitted: output tokens of these steps: the accepted drafts and, unless an accepted one ended the request, a
            recovered or bonus token each; emitted / verifications is the mean acceptance length.
        drafted, accepted: drafts judged / accepted.
        reached: drafts judged whose predecessors in the step were all accepted; accepted / reached is the conditional
            acceptance of a position.
    """

    num_verifications: int = 0
    num_emitted: int = 0
    drafted: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds since the epoch (0.0 = has not happened) and counts, of one request."""

    arrival_time: float
    first_scheduled_time: float
    first_token_time: float
    finished_time: float
    num_preemptions: int = 0
    drafts: DraftCounts = DraftCounts()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step (or an error) added to a request. `finish_reason` is set exactly once, on the last one.

    Attributes:
        token_ids: the new tokens, cut at the token that ended the request (an EOS or stop token is included).
        logprobs: one per token when asked for, else None.
        stop_reason: the stop token id that matched, when it was not an EOS.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        error: (exception class name in errors.py, message) when finish_reason is ERROR.
        metrics: set on the last output.
        draft_logprobs: the drafts this step judged, when the request asked for them, else None.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: tuple[str, str] | None = None
    metrics: RequestMetrics | None = None
    draft_logprobs: tuple[DraftLogprob, ...] | None = None


# ---- scheduler -> worker --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LogprobArrays:
    """Log-probabilities of a step's tokens; n is the largest number of alternatives asked for in the step.

    Attributes:
        logprobs: f32[O], NaN where not asked for; ranks: i32[O] from 1, 0 where not asked for;
        top_token_ids: i32[O, n]; top_logprobs: f32[O, n].
    """

    logprobs: F32
    ranks: I32
    top_token_ids: I32
    top_logprobs: F32


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Guesses to be judged; row r owns `token_ids[cu_num_draft[r]:cu_num_draft[r+1]]`.

    Attributes:
        token_ids: i32[D].
        cu_num_draft: i32[R+1].
        sources: i8[D], a DraftSource each; None = all CUSTOM.
        logprobs: over D, under the drafting model; None when no request of the step asked, or no model drafted.

    Every draft is certain (one-hot) in its method's eyes: verification needs no distribution of it.
    """

    token_ids: I32
    cu_num_draft: I32
    sources: I8 | None = None
    logprobs: LogprobArrays | None = None

    @staticmethod
    def none(num_requests: int) -> DraftTokens:
        return DraftTokens(EMPTY_I32, np.zeros(num_requests + 1, np.int32))

    def row(self, r: int) -> I32:
        return self.token_ids[self.cu_num_draft[r] : self.cu_num_draft[r + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """First sight of a request for the worker, also when it comes back after preemption.

    Attributes:
        token_ids: i32[n], prompt and committed output so far.
        num_prompt_tokens: the first `num_prompt_tokens` of token_ids are the prompt.
    """

    request: Request
    token_ids: I32
    num_prompt_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What changed for a request the worker knows: blocks appended to its table."""

    request_id: RequestId
    new_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """One step's plan. Row r is request_ids[r] in every array.

    Attributes:
        new: requests the worker has not seen (or has forgotten after preemption), a subset of request_ids.
        deltas: known requests whose block table grew, a subset of request_ids.
        num_computed_tokens: i32[R], tokens whose KV is already in the cache.
        num_new_tokens: i32[R] >= 1, tokens to run now, drafts included.
        draft: the drafts among them; row r's are its last `num_draft[r]` new tokens.
        max_draft_len: i32[R], how many drafts the proposer may return for the next step.
        finished_ids, preempted_ids: requests whose worker state must be dropped before this step.
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


# ---- worker ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SamplingArrays:
    """Sampling parameters of the step's requests as columns; ragged parts have `cu_*` offsets.

    Attributes:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: f32[R].
        top_k: i32[R], 0 = off.
        seed: u64[R].
        num_logprobs: i32[R], -1 = not asked for.
        penalty_slot: i32[R], row of token_counts, -1 = no penalty applies to the request.
        token_counts: i32[num_slots, V]: bits 0..29 count the token in the output, bit 30 says it is in the prompt.
        cu_bias, bias_token_ids, bias_values: i32[R+1], i32[B], f32[B] logit_bias per request.
        cu_mask, mask_token_ids: i32[L+1], i32[K] tokens forbidden per logits row (bad words, min_tokens).
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    repetition_penalty: F32
    presence_penalty: F32
    frequency_penalty: F32
    seed: U64
    num_logprobs: I32
    penalty_slot: I32
    token_counts: I32
    cu_bias: I32
    bias_token_ids: I32
    bias_values: F32
    cu_mask: I32
    mask_token_ids: I32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step as flat ragged arrays (the virtual-padding maps): nothing is padded, copied per request or sliced.

    Holds until the next step is built: the arrays, and often the object, are the same from step to step.

    Attributes:
        input_ids, positions: i32[T], rows concatenated; 0-based absolute positions.
        slot_mapping: i64[T], block_id * block_size + offset.
        query_start_loc: i32[R+1], row r owns tokens [q[r], q[r+1]).
        seq_lens: i32[R], length including this step's tokens.
        block_tables: i32[R, max_blocks], padded with -1.
        logits_indices: i32[L], the rows of T that need logits.
        cu_num_logits: i32[R+1], num_draft[r] + 1 logits rows, 0 while the prompt is unfinished.
        batch_id_per_output: i32[L], request row of every logits row.
        output_positions: i32[L], absolute position of the token that a logits row is for.
    """

    request_ids: tuple[RequestId, ...]
    input_ids: I32
    positions: I32
    slot_mapping: I64
    query_start_loc: I32
    seq_lens: I32
    block_tables: I32
    logits_indices: I32
    cu_num_logits: I32
    batch_id_per_output: I32
    output_positions: I32
    draft: DraftTokens
    sampling: SamplingArrays


@dataclass(frozen=True, slots=True, eq=False)
class VerifyResult:
    """Output tokens of a step: per row the accepted drafts, then one recovered or bonus token.

    Holds until the next step is judged, which writes into the same arrays.

    Attributes:
        token_ids: i32[O].
        cu_num_output: i32[R+1]; a row has num_accepted + 1 tokens, 0 while its prompt is unfinished.
        num_accepted: i32[R].
        logprobs: None when no request of the step asked.
    """

    token_ids: I32
    cu_num_output: I32
    num_accepted: I32
    logprobs: LogprobArrays | None = None

    def row(self, r: int) -> I32:
        return self.token_ids[self.cu_num_output[r] : self.cu_num_output[r + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the worker returns. Rows follow the plan's request_ids.

    Everything but `drafts` and `failed` holds until the next step; drafts are kept for several, and made
    anew each time.

    Attributes:
        drafts: guesses for the next step, at most max_draft_len[r] in row r, and so few that the request's max_tokens
            leave room for one token behind them; 0 while the prompt is unfinished.
        failed: requests whose computation broke (non-finite logits, a kernel that refused their row), with what
            `RequestOutput.error` says of it; their rows carry no output.
        timings_ms: e.g. {"batch": .., "forward": .., "verify": .., "draft": ..}.
    """

    step_id: int
    request_ids: tuple[RequestId, ...]
    verified: VerifyResult
    drafts: DraftTokens
    failed: Mapping[RequestId, tuple[str, str]] = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpeculationInfo:
    """What requests may ask of the loaded drafting methods, and what these ask of the engine.

    Attributes:
        method: what a request gets that names none.
        methods: what it may name.
        max_draft_tokens: drafts per request and step at most (k).
        num_lookahead_slots: KV slots from a request's newest token on that drafting writes; 0 = it writes none.
        lossy: verification may emit tokens that plain decoding would not: verify_strategy greedy or topp, for every
            request, or accept_policy accept_all, for those that draft.
        has_draft_logprobs: whether a request may ask for draft log-probabilities.
    """

    method: str = "naive"
    methods: tuple[str, ...] = ("naive",)
    max_draft_tokens: int = 0
    num_lookahead_slots: int = 0
    lossy: bool = False
    has_draft_logprobs: bool = False

    def method_of(self, wish: Speculation) -> str:
        """The method that drafts for a request with this validated wish."""
        return (wish.method or self.method) if wish.enabled else "naive"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the frontend need to know of a loaded model."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    speculation: SpeculationInfo = SpeculationInfo()

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request, prompt and output together: what fits into the model's context and the KV cache.

        The last output token is never fed back, so its KV is never needed.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)
