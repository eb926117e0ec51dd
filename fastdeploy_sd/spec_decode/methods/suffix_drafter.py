"""Suffix decoding in the kernel library: automata of texts, and drafts from them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import CParams, call, library
from fastdeploy_sd.spec_decode.methods.native_texts import NativeTexts
from fastdeploy_sd.types import I32, I64

SALT_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """How drafts are made.

    Attributes:
        max_context: the longest context that is matched, in tokens, >= 1.
        max_factor: drafts per token of the matched context at most, >= 0.
        min_token_prob: the drafts' joint probability at least, 0 .. 1.
        follows_copies: a match of at least six tokens of the row's own text continues after a replaced token.
    """

    max_context: int = 64
    max_factor: float = 1.0
    min_token_prob: float = 0.1
    follows_copies: bool = True


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """What the shared cache may hold: outputs, -1 = any number, and bytes; 0 of either = nothing."""

    max_outputs: int
    max_bytes: int


class SuffixStats(NamedTuple):
    """What the shared cache holds.

    Attributes:
        num_bytes: of all kept memory, with dropped memory that is not freed yet.
        num_sequences: pieces of outputs in the cache; one that was continued in a younger shard counts in both.
        num_steps: elementary steps of all appends since the start.
        num_cut_counts: appends that did not count their shortest strings.
    """

    num_bytes: int
    num_tokens: int
    num_outputs: int
    num_sequences: int
    num_shards: int
    num_salts: int
    num_steps: int
    num_cut_counts: int


@dataclass(frozen=True, slots=True, eq=False)
class SuffixSequences:
    """Pieces of outputs as cached, the oldest first; sequence q has tokens cu_tokens[q] .. cu_tokens[q + 1] - 1."""

    salt_digests: npt.NDArray[np.uint8]  # [Q, 16]
    cu_tokens: I64  # [Q+1]
    token_ids: I32  # [N]


class SuffixDrafter(NativeTexts):
    """Texts of the requests in table rows, outputs shared between requests of one salt, and drafts from both.

    The context's last `max_context` tokens are matched in the row's own text and in every shard of its salt. The
    longest match of each, and a few of its shorter suffixes, make a draft each: the most frequent continuation. A
    draft ends where its joint probability, estimated from counts, falls below `min_token_prob`, and at `max_factor`
    times the match. The draft with the highest sum of joint probabilities wins; ties go to the longer match, then to
    the own text.

    With follows_copies, a match of at least six own tokens may continue after one replaced token, while that paid at
    most of the text's last changes. `limits`: of the shared cache. A table row's own text is not counted; it takes
    about 50 bytes per token.

    Source: arXiv:2411.04975 (SuffixDecoding).
    """

    def __init__(
        self,
        num_table_rows: int,
        vocab_size: int,
        rule: SuffixRule,
        limits: SuffixLimits,
        *,
        makes_trees: bool = False,
    ) -> None:
        super().__init__(
            "suffix",
            makes_trees=makes_trees,
            num_table_rows=num_table_rows,
            vocab_size=vocab_size,
            **asdict(rule),
            max_cached_outputs=limits.max_outputs,
            max_cached_bytes=limits.max_bytes,
        )

    def begin(
        self, table_row: int, num_private: int, salt_digest: bytes, end_token_ids: Sequence[int] = (), end_from: int = 0
    ) -> None:
        """Start a table row, whatever it held; its text is read in its first step.

        Args:
            num_private: leading tokens that are no new output: the prompt, and output that was shared before. Their
                last `max_context` are shared as the context of the first new token.
            end_token_ids: the first of these from index `end_from` on is the last token to be shared.

        Raises ValueError: the table row or a length is out of range, or memory is exhausted.
        """
        if len(salt_digest) != SALT_DIGEST_BYTES:
            raise ValueError(f"salt_digest: expected {SALT_DIGEST_BYTES} bytes, got {len(salt_digest)}")
        digest, ends = np.frombuffer(salt_digest, np.uint8), np.array(end_token_ids, np.int32)
        params = struct_type("SuffixBeginParams")(
            drafter=self._handle,
            table_row=table_row,
            num_tokens=num_private,
            salt_digest=digest.ctypes.data,
            first_end=end_from,
            num_end_token_ids=len(ends),
            end_token_ids=ends.ctypes.data,
        )
        call("suffix_begin", params)

    def stats(self) -> SuffixStats:
        stats = struct_type("SuffixStats")()
        library().fdsd_suffix_stats(self._handle, ctypes.byref(stats))
        return SuffixStats(*(getattr(stats, name) for name in SuffixStats._fields))

    def export_sequences(self) -> SuffixSequences:
        stats = self.stats()
        sequences = SuffixSequences(
            np.empty((stats.num_sequences, SALT_DIGEST_BYTES), np.uint8),
            np.empty(stats.num_sequences + 1, np.int64),
            np.empty(stats.num_tokens, np.int32),
        )
        call("suffix_export", self._sequences_params(sequences))
        return sequences

    def import_sequences(self, sequences: SuffixSequences) -> None:
        """Add every piece to the shared cache, in order; raises ValueError for invalid arrays or exhausted memory."""
        call("suffix_import", self._sequences_params(sequences))

    def count(self, table_row: int, token_ids: I32) -> list[int]:
        """Return how often i32[n], n >= 1, occurs in the row's own text, then in each of its salt's shards by age."""
        counts, num_counts = np.empty(self.stats().num_shards + 1, np.int64), np.zeros(1, np.int32)
        num_tokens = len(token_ids)
        params = struct_type("SuffixCountParams")(
            drafter=self._handle,
            table_row=table_row,
            num_tokens=num_tokens,
            max_counts=len(counts),
            token_ids=pointer("token_ids", token_ids, (num_tokens,), np.int32),
            counts=counts.ctypes.data,
            num_counts=num_counts.ctypes.data,
        )
        call("suffix_count", params)
        return [int(count) for count in counts[: num_counts[0]]]

    def check_integrity(self) -> None:
        """Check all structures against their definitions, in linear time; raises ValueError naming what is wrong."""
        function = library().fdsd_suffix_check_integrity
        function.restype = ctypes.c_char_p
        error = function(self._handle)
        if error:
            raise ValueError(f"suffix_check_integrity: {error.decode()}")

    def _sequences_params(self, sequences: SuffixSequences) -> CParams:
        num_sequences, num_tokens = len(sequences.salt_digests), len(sequences.token_ids)
        return struct_type("SuffixSequencesParams")(
            drafter=self._handle,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            salt_digests=pointer("salt_digests", sequences.salt_digests, (num_sequences, SALT_DIGEST_BYTES), np.uint8),
            cu_tokens=pointer("cu_tokens", sequences.cu_tokens, (num_sequences + 1,), np.int64),
            token_ids=pointer("token_ids", sequences.token_ids, (num_tokens,), np.int32),
        )
