"""Meaning of ngram_match."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.ngram_texts import NgramLengths, NgramTexts
from fastdeploy_sd.types import I32, DraftTokens


def ngram_match(texts: NgramTexts, lengths: NgramLengths) -> tuple[DraftTokens, I32]:
    """Draft from the requests' own texts.

    The longest end of a text, of min_n..max_n tokens, that also occurs before the end, within the committed tokens,
    decides, at its latest occurrence. What followed there is drafted; where that runs into the end of the text, it goes
    on with what was just drafted.

    Returns:
        the drafts, and i32[R] how many tokens agreed, 0 where nothing was found.

    Source: arXiv:2304.04487 (LLMA), and prompt lookup decoding.
    """
    drafts: list[int] = []
    ends, matched = [0], []
    for r, (table_row, wanted) in enumerate(zip(texts.table_rows, texts.max_draft_len.tolist(), strict=True)):
        committed = texts.token_table[table_row, : texts.num_tokens[r]].tolist()
        text = committed + ([] if texts.prefix is None else texts.prefix.row(r).tolist())
        length, place = _longest(text, len(committed), lengths) if wanted > 0 else (0, 0)
        for i in range(min(wanted, int(length * lengths.max_factor + 1e-9))):
            text.append(text[place + i])
            drafts.append(text[-1])
        ends.append(len(drafts))
        matched.append(length)
    return DraftTokens(np.array(drafts, np.int32), np.array(ends, np.int32)), np.array(matched, np.int32)


def _longest(text: list[int], num_committed: int, lengths: NgramLengths) -> tuple[int, int]:
    """How many tokens agree, and the place after their latest earlier occurrence; (0, 0) where there is none."""
    for n in range(lengths.max_n, lengths.min_n - 1, -1):
        for place in range(min(num_committed, len(text) - 1), n - 1, -1):
            if len(text) >= n and text[place - n : place] == text[-n:]:
                return n, place
    return 0, 0
