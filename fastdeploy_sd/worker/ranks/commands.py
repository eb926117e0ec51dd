"""Commands of rank 0's worker to the other ranks, step by step. Values only; distributed/ sends them.

A step is TakePlan, then RunRows until one has succeeded for every row, each followed by CompactPaths, where drafts
branch, and TakeOutput; then, where draft layers run, DraftRows with its DraftOutcome. BeginDrafts, ForgetDrafts and
ReadAdapter may come before any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.spec_decode.proposer import DraftRequest
from fastdeploy_sd.types import F32, I32, AdapterLoad, RequestId, SchedulerOutput


@dataclass(frozen=True, slots=True, eq=False)
class TakePlan:
    """A step begins.

    Attributes:
        plan: without log-probabilities of drafts, which only rank 0 reports.
        refused_ids: new requests that rank 0 refused, so every rank does.
    """

    plan: SchedulerOutput
    refused_ids: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter is to be read; a later plan puts it into its place."""

    load: AdapterLoad


@dataclass(frozen=True, slots=True, eq=False)
class RunRows:
    """Run the model over rows of the step's plan, intp[n] rising as i32; None = all of them."""

    attempt: int
    rows: I32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CompactPaths:
    """Move what the rows that just ran stored for drafts of accepted paths; see `ops.compaction.VerifiedPaths`.

    Attributes:
        output_rows: i32[O], without those after the outputs.
    """

    attempt: int
    output_rows: I32
    cu_num_output: I32


@dataclass(frozen=True, slots=True, eq=False)
class TakeOutput:
    """Append the output of the rows that just ran; see `types.VerifyResult`."""

    token_ids: I32
    cu_num_output: I32


@dataclass(frozen=True, slots=True)
class BeginDrafts:
    """A method's draft model gets these requests."""

    method: str
    requests: tuple[DraftRequest, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ForgetDrafts:
    """A method's draft model loses the requests of these table rows, i32[n]."""

    method: str
    table_rows: I32


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """Run a method's draft model over the rows that just ran, or some of them.

    Attributes:
        table_rows: i32[n], neighbours in the step and in its order.
        max_draft_len: i32[n].
        min_survival: f32[n], see DraftProbabilities; None = probabilities are not wanted.
    """

    attempt: int
    method: str
    table_rows: I32
    max_draft_len: I32
    min_survival: F32 | None = None


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Whether every rank has run them; else the attempt has failed on all."""

    has_succeeded: bool


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank could not run an attempt; has_lost_experts: see coordinator.LostExpertsError."""

    reason: str
    has_lost_experts: bool = False


Attempt = RunRows | CompactPaths | DraftRows
Command = ReadAdapter | TakePlan | TakeOutput | BeginDrafts | ForgetDrafts | Attempt | DraftOutcome
