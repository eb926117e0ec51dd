"""What goes between frontend and engine: a request, and the outputs of its steps."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types.adapters import Adapter
from fastdeploy_sd.types.arrays import EMPTY_I32, F32, I32

RequestId = str


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request says about drafting; the defaults leave everything to the server's configuration.

    Attributes:
        method: one of `SpeculationInfo.methods`; None = the server's.
        num_speculative_tokens: drafts per step at most, 1 .. `SpeculationInfo.max_draft_tokens`; None = the server's.
        num_draft_logprobs: alternatives to report with each verified draft's log-probability; None = report none.
        token_sources: report who guessed each output token.
    """

    enabled: bool = True
    method: str | None = None
    num_speculative_tokens: int | None = None
    num_draft_logprobs: int | None = None
    token_sources: bool = False


@dataclass(frozen=True, slots=True)
class KvSource:
    """An instance that computes the KV of prompts for others; `address` is "tcp://host:port"."""

    instance_id: str
    address: str


class Pooling(enum.StrEnum):
    """What an embedding is made of: the hidden rows of all tokens of a text, or that of the last one."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence to generate, validated; a user's request with n > 1 becomes n of these.

    Attributes:
        prompt_token_ids: i32[P], P >= 1.
        max_tokens: resolved, >= 1, also where `sampling.max_tokens` is 0 and the first token is dropped;
            P + max_tokens <= ModelInfo.max_request_tokens.
        seed: resolved, so that `philox(seed, position)` is always defined.
        eos_token_ids: ids that end the request unless `sampling.ignore_eos`.
        bad_words_token_ids: sequences that may not be completed.
        priority: lower runs first; ties by arrival.
        client: whose request it is, for sharing the engine fairly; those without a name are of one client.
        arrival_time: seconds since the epoch.
        cache_salt: requests share prefix blocks, and outputs to draft from, only with the same salt and adapter.
        output_token_ids: i32[n], 0 <= n < max_tokens, generated elsewhere: the request goes on after them as after a
            preemption. They are not among its outputs.
        kv_source: who computes the KV of its prompt; None = the instance that has the request.
        grammar: what its output must be, in the syntax of llguidance; "" = anything.
        prediction_token_ids: i32[n], what the client expects the output to be; drafts are taken from it.
        pooling: of the embedding of its prompt, which its output has; None = none is asked for.
        adapter: None = the model runs as it is.
        trace_context: `traceparent` of the span that those who compute a part of it are below; "" = none.
    """

    request_id: RequestId
    prompt_token_ids: I32
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    client: str = ""
    arrival_time: float = 0.0
    cache_salt: str = ""
    speculation: Speculation = Speculation()
    output_token_ids: I32 = field(default_factory=lambda: EMPTY_I32)
    kv_source: KvSource | None = None
    grammar: str = ""
    prediction_token_ids: I32 = field(default_factory=lambda: EMPTY_I32)
    pooling: Pooling | None = None
    adapter: Adapter | None = None
    trace_context: str = ""

    @property
    def adapter_digest(self) -> str:
        """The adapter's digest, "" without one."""
        return "" if self.adapter is None else self.adapter.digest


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


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt of P tokens after its first, with n alternatives each.

    Attributes:
        logprobs, ranks: f32[P-1], i32[P-1].
        top_token_ids, top_logprobs: i32[(P-1)*n], f32[(P-1)*n]; the n of a token are neighbours, best first.
    """

    logprobs: F32
    ranks: I32
    top_token_ids: I32
    top_logprobs: F32

    def entries(self, prompt_token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Return those of the tokens after the first, with at most `num_top` alternatives each."""
        num_tokens = len(self.logprobs)
        top_token_ids = self.top_token_ids.reshape(num_tokens, -1)[:, :num_top] if num_tokens else self.top_token_ids
        top_logprobs = self.top_logprobs.reshape(num_tokens, -1)[:, :num_top] if num_tokens else self.top_logprobs
        return [
            TokenLogprob(token_id, logprob, rank, tuple(ids), tuple(values))
            for token_id, logprob, rank, ids, values in zip(
                prompt_token_ids[1:],
                self.logprobs.tolist(),
                self.ranks.tolist(),
                top_token_ids.tolist(),
                top_logprobs.tolist(),
                strict=True,
            )
        ]


@dataclass(frozen=True, slots=True)
class DraftLogprob:
    """A verified draft and how sure its method was of it.

    Attributes:
        position: 0 for the first draft of its step.
        accepted: it became output; a right draft after the token that ended the request did not.
    """

    draft: TokenLogprob
    position: int
    accepted: bool


# In place of a DraftSource's name: the target gave the token, and it was not drafted.
TARGET = "target"


@dataclass(frozen=True, slots=True)
class StepSources:
    """Who guessed the output tokens of one step; a name is that of a DraftSource in lower case.

    Attributes:
        runs: (name or TARGET, number of tokens) of neighbouring tokens, in their order.
        drafted: name -> drafts verified in the step, those after the end of the request too.
    """

    runs: tuple[tuple[str, int], ...] = ()
    drafted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What verification did with drafts. Entry i of a tuple is about the draft at position i of its step.

    Drafts after the token that ended the request count in no tuple, so an accepted draft is one that became output.

        drafts     a  b  c  d                all of them right, b ends the request
        output     a  b                      num_emitted 2, drafted, reached and accepted (1, 1)

    Attributes:
        num_verifications: steps that verified at least one draft of the request.
        num_emitted: output tokens of these steps; emitted / verifications is the mean acceptance length.
        reached: drafts verified whose predecessors in the step were all accepted; accepted / reached is the conditional
            acceptance of a position.
        num_predicted, num_predicted_accepted: of the drafts verified and accepted, those from the client's prediction.
    """

    num_verifications: int = 0
    num_emitted: int = 0
    drafted: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    num_predicted: int = 0
    num_predicted_accepted: int = 0


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds since the epoch (0.0 = has not happened) and counts, of one request.

    Attributes:
        num_token_steps: steps that gave it tokens. num_step_tokens: the tokens that they gave.
        accepted_by_source: DraftSource name in lower case -> drafts of it that became output; only sources with some.
        gain: tokens per second over those of plain decoding, of all requests in the steps before its end, as a method
            that chooses measures it against plain steps; 0.0 = not known.
    """

    arrival_time: float
    first_scheduled_time: float
    first_token_time: float
    finished_time: float
    num_preemptions: int = 0
    drafts: DraftCounts = DraftCounts()
    num_token_steps: int = 0
    num_step_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    gain: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Plain decoding gives 1.0; 0.0 = no step gave a token."""
        return self.num_step_tokens / self.num_token_steps if self.num_token_steps else 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step (or an error) added to a request. `finish_reason` is set exactly once, on the last one.

    Attributes:
        token_ids: cut at the token that ended the request (an EOS or stop token is included).
        logprobs, draft_logprobs: per token, and per draft verified in this step, when asked for.
        stop_reason: the stop token id that matched, when it was not an EOS.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        error: (exception class name in errors.py, message) when finish_reason is ERROR.
        metrics: set on the last output.
        prompt_logprobs: on the first output with a token, or that has none to come, when asked for.
        sources: when asked for.
        embedding: f32[H] of the prompt, on the same output, when asked for.
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
    prompt_logprobs: PromptLogprobs | None = None
    sources: StepSources | None = None
    embedding: F32 | None = None
