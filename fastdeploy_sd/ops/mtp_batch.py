"""What mtp_preprocess, mtp_postprocess_ and keep_hidden_ take and return: arrays, tensors or symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fastdeploy_sd.types import F32, I32

A = TypeVar("A", bound=Any)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """The requests that draft, as columns on the host; constant over the passes of a step.

    Attributes:
        table_rows: i32[R], row of the two tables.
        num_committed: i32[R], committed tokens.
        cu_num_draft: i32[R+1], room for the drafts of each request.
        draft_token_ids: i32[D], filled in pass by pass.
        num_wanted: i32[R], the drafts that each request gets; lowered where its drafts became improbable.
        draft_prob: f32[D], the probability of each draft under the draft layers, where it is wanted.
        min_survival: f32[R], a request whose drafts so far are less probable together gets no more; negative = that is
            not looked at, and no probability is wanted.
        min_prob: a draft that is less probable is not made; where its probability is wanted.
        token_table, block_table: i32[num_table_rows, max_tokens_per_row], i32[num_table_rows, max_blocks].
        num_drafting: requests that may get more than i drafts, by i.
    """

    table_rows: I32
    num_committed: I32
    cu_num_draft: I32
    draft_token_ids: I32
    num_wanted: I32
    draft_prob: F32
    min_survival: F32
    min_prob: float
    token_table: I32
    block_table: I32
    block_size: int
    num_drafting: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class MtpPass:
    """What one draft layer computes: request r the KV slots [begin[r], end[r]), none where these are equal.

    Attributes:
        begin, end: i32[R], begin >= 1.
        source: the layer whose output the hidden rows are; 0 = the target.
        hidden_begin: i32[R], position of the request's first hidden row.
        cu_hidden: i32[R+1], row r owns hidden rows [cu[r], cu[r+1]); cu[0] need not be 0.
        num_tokens: T, the rows to run: the sum of end - begin, and MaskedRows where there are some.
    """

    begin: I32
    end: I32
    source: int
    hidden_begin: I32
    cu_hidden: I32
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStateBuffer(Generic[A]):
    """Hidden rows of one source layer, the target or a draft layer, that outlive their step. f32, bf16 or f16.

    Attributes:
        blocks: [num_blocks, H], the row of the last token of every full block.
        requests: [num_table_rows * num_kept, H]: position p of a request is row table_row * num_kept + p % num_kept.
    """

    blocks: A
    requests: A
    block_size: int
    num_kept: int


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows(Generic[A]):
    """Hidden rows of one source layer: this step's, [rows, H], and those kept from earlier ones."""

    step: A
    kept: HiddenStateBuffer[A]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows(Generic[A]):
    """Rows after those of a request that drafts, with which one pass makes all of its drafts.

    They run `token` with the hidden row `hidden` [H], at the slots from MtpPass.end on, and know only their place. The
    request's last rows make its drafts, one each.

    Attributes:
        hidden: None = no hidden rows are read.
        more_rows: of a request besides one for each draft, at least -1.
        token_shift: 1 = the row at slot q runs the token at q - 1, so the first one that of the newest token; 0 or 1.
        num_drafts: of all requests.
    """

    token: int
    hidden: A | None
    more_rows: int
    token_shift: int
    num_drafts: int


class RowMaps(Protocol):
    """Which positions a pass computed: of request r those before seq_lens[r], i32[R], on the rows that are its own."""

    @property
    def query_start_loc(self) -> Any: ...

    @property
    def seq_lens(self) -> Any: ...


class MtpInputs(NamedTuple):
    """What a draft layer runs on: the maps as in `reference.batch.BatchMaps`.

    Attributes:
        draft_rows: i32[A], the last row of every request that drafts; with MaskedRows one for each draft.
        hidden: [T, H], the row of the position before each token.
    """

    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    draft_rows: Any
    hidden: Any


class NextInputs(NamedTuple):
    """The same for the pass that continues after a draft: each of the first num_continued, i32[1], rows drafts."""

    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    hidden: Any
    num_continued: Any

    def first(self, count: int) -> NextInputs:
        """Return the rows in use, without the unused ones after them."""
        rows = (self.input_ids[:count], self.positions[:count], self.slot_mapping[:count])
        return NextInputs(*rows, self.query_start_loc, self.seq_lens, self.hidden[:count], self.num_continued)
