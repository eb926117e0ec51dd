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
    """How long what is looked up and what is drafted may be.

    Attributes:
        min_n, max_n: tokens of a text's end that are looked up, 1 <= min_n <= max_n.
        max_factor: drafts for each token that agreed, at most, > 0.
    """

    min_n: int
    max_n: int
    max_factor: float
