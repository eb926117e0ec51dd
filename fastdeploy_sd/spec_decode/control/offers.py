"""The rows of a step and what sources offer for them, in arrays that the policy's native code reads as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdeploy_sd.spec_decode.methods.native.draft_call import DraftRows, NativeDrafter
from fastdeploy_sd.types import F32, I32

NUM_EVIDENCE = 3


class NativeMethod(Protocol):
    """A drafting method whose drafter native code can ask."""

    @property
    def native_drafter(self) -> NativeDrafter: ...


class PolicyRows(DraftRows, Protocol):
    """The rows of a step that was committed; those of prompts under way may be left out.

    What a row was offered is scored also where its max_draft_len is 0. `prefix` is drafts that are certain, with their
    sources; what is offered follows them.

    Attributes:
        token_table: i32[num_table_rows, max_model_len], committed tokens.
    """

    @property
    def token_table(self) -> I32: ...


@dataclass(frozen=True, slots=True, eq=False)
class DraftOffer:
    """The arrays of one source: its drafts for the rows of a step, with what it knows of them.

    Attributes:
        token_ids: i32[D], D at least the sum of the rows' max_draft_len; the first cu_num_draft[R] are drafts.
        cu_num_draft: i32[R+1].
        evidence: i32[R, 3]: tokens of the text's end that agreed, of them those behind the last replaced one, and the
            origin: 0 = the request's own text, 1 = other requests' outputs. 0 where nothing was drafted.
        draft_prob: f32[D]: how often each token followed, over one more than how often anything did; 0.5 from a
            drafter that does not count.
    """

    token_ids: I32
    cu_num_draft: I32
    evidence: I32
    draft_prob: F32


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

    def offer(self, source: int, num_rows: int) -> DraftOffer:
        """The arrays in which a source offers drafts for `num_rows` rows."""
        p = self.planes
        return DraftOffer(
            p.token_ids[source], p.cu_num_draft[source, : num_rows + 1], p.evidence[source, :num_rows],
            p.draft_prob[source],
        )  # fmt: skip

    def clear(self, source: int) -> None:
        """The source offers nothing in this step."""
        self.planes.cu_num_draft[source] = 0
