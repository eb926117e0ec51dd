"""What several sources offer for the rows of a step, in arrays that the policy's native code reads as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdeploy_sd.spec_decode.native.draft_call import NUM_EVIDENCE, DraftOffer
from fastdeploy_sd.spec_decode.proposer import ProposeInput


class OfferingProposer(Protocol):
    """A drafting method that also says what it knows of its drafts."""

    def offer(self, x: ProposeInput, out: DraftOffer) -> None:
        """Draft as `propose` does, into the arrays of `out`.

        Raises:
            ValueError: as `propose`, or `out` has too little room.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Planes:
    """i32[S, D], i32[S, R+1], i32[S, R, 3], f32[S, D]; see DraftOffer."""

    token_ids: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    cu_num_draft: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    evidence: np.ndarray[tuple[int, int, int], np.dtype[np.int32]]
    draft_prob: np.ndarray[tuple[int, int], np.dtype[np.float32]]


class OfferTable:
    """The offers of a step, one plane per source; the same arrays in every step.

    Args:
        num_sources: S.
        max_num_rows: rows of a step at most.
        max_draft_len: drafts per row and source at most.

    Attributes:
        planes: the arrays of all sources.
    """

    def __init__(self, num_sources: int, max_num_rows: int, max_draft_len: int) -> None:
        s, r, d = num_sources, max_num_rows, max_num_rows * max_draft_len
        self.planes = _Planes(
            np.zeros((s, d), np.int32),
            np.zeros((s, r + 1), np.int32),
            np.zeros((s, r, NUM_EVIDENCE), np.int32),
            np.zeros((s, d), np.float32),
        )
        self._offers: dict[tuple[int, int], DraftOffer] = {}

    def offer(self, source: int, num_rows: int) -> DraftOffer:
        """The arrays in which a source offers drafts for `num_rows` rows; the same object each time."""
        found = self._offers.get((source, num_rows))
        if found is None:
            p = self.planes
            found = self._offers[source, num_rows] = DraftOffer(
                p.token_ids[source], p.cu_num_draft[source, : num_rows + 1], p.evidence[source, :num_rows],
                p.draft_prob[source],
            )  # fmt: skip
        return found

    def clear(self, source: int) -> None:
        """The source offers nothing in this step."""
        self.planes.cu_num_draft[source] = 0
