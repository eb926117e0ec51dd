"""What n-gram matching is told about texts; shared by its implementations. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy_sd.types import I32, DraftTokens


class NgramTexts(NamedTuple):
    """The requests' texts: the committed tokens of each, then its prefix.

    Attributes:
        token_table: i32[S, max_tokens_per_row].
        table_rows: i32[R], row of the table of each request.
        num_tokens: i32[R], committed tokens.
        max_draft_len: i32[R] >= 0, drafts wanted at most, the prefix not counted.
        prefix: tokens after the committed ones; None = no request has any.
    """

    token_table: I32
    table_rows: I32
    num_tokens: I32
    max_draft_len: I32
    prefix: DraftTokens | None


class NgramLengths(NamedTuple):
    """Ends of min_n..max_n tokens are looked up; each token that agrees gives at most max_factor drafts."""

    min_n: int
    max_n: int
    max_factor: float
