"""ngram_match: its declaration, and the call on NumPy arrays. Only a GPU has a kernel."""

from __future__ import annotations

from typing import cast

from fastdeploy_sd.device.program import declaration as d
from fastdeploy_sd.device.program.declaration import Attr, In, Out, each
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.ops.ngram_texts import NgramLengths, NgramTexts
from fastdeploy_sd.types import EMPTY_I32, I32, DraftTokens

NGRAM_MATCH = HostOp(
    "ngram_match",
    token_table=In(d.I32, "num_table_rows, max_tokens_per_row"),
    **each(In(d.I32, "num_requests"), "table_rows", "num_tokens", "max_draft_len"),
    prefix_token_ids=In(d.I32, "num_prefix_tokens"),
    cu_num_prefix=In(d.I32, "num_requests + 1", optional=True),
    **each(Attr(int), "min_n", "max_n"),
    max_factor=Attr(float),
    max_num_drafts=Attr(int),
    draft_token_ids=Out(d.I32, "max_num_drafts"),
    cu_num_draft=Out(d.I32, "num_requests + 1"),
    num_matched=Out(d.I32, "num_requests"),
)


def ngram_match(texts: NgramTexts, lengths: NgramLengths) -> tuple[DraftTokens, I32]:
    """Draft what followed the latest occurrence of the longest end of each text; see `reference.ngram.ngram_match`.

    Raises ValueError: min_n is below 1, max_n below min_n, or max_factor not positive.
    """
    prefix = texts.prefix
    token_ids, cu_num_draft, num_matched = NGRAM_MATCH(
        **NGRAM_MATCH.arguments_in(texts),
        prefix_token_ids=EMPTY_I32 if prefix is None else prefix.token_ids,
        cu_num_prefix=None if prefix is None else prefix.cu_num_draft,
        **lengths._asdict(),
        max_num_drafts=int(texts.max_draft_len.sum()),
    )
    return DraftTokens(token_ids[: cu_num_draft[-1]], cu_num_draft), cast("I32", num_matched)
