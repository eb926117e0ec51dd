"""Drafts from predicted texts, in the kernel library. Knows table rows and token ids, no requests."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from fastdeploy_sd.device.arrays import pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, library
from fastdeploy_sd.spec_decode.methods.native.draft_call import DraftCall, DraftRows, NativeDrafter, table_rows_params
from fastdeploy_sd.types import I32, DraftTokens


class PredictionDrafter:
    """The predicted outputs of some table rows, and the position of each row in its text.

    A predicted text and its index take 20 to 32 bytes per token. The time of a step does not depend on its length.

    Args:
        num_table_rows: as many requests at most.

    Raises:
        ValueError: the number is negative.
    """

    def __init__(self, num_table_rows: int) -> None:
        handle = ctypes.c_void_p()
        params = struct_type("PredictionCreateParams")(num_table_rows=num_table_rows, drafter=ctypes.addressof(handle))
        call("prediction_create", params)
        self._handle = handle
        weakref.finalize(self, library().fdsd_prediction_destroy, handle)
        self._propose = DraftCall("prediction_propose", handle)

    @property
    def drafter(self) -> NativeDrafter:
        """For native code that drafts with it as `propose` does."""
        return self._propose.drafter

    def begin(self, table_row: int, first_output: int, predicted: I32) -> None:
        """Begin a request in a table row.

        Args:
            first_output: index of the output's first token: the length of the prompt.
            predicted: i32[n], the predicted output.

        Raises:
            ValueError: the table row is out of range, or memory is exhausted.
        """
        where = pointer("predicted", predicted, (len(predicted),), np.int32)
        params = struct_type("PredictionBeginParams")(
            drafter=self._handle,
            table_row=table_row,
            first_output=first_output,
            num_predicted=len(predicted),
            predicted=where,
        )
        call("prediction_begin", params)

    def forget(self, table_rows: I32) -> None:
        """Free what these table rows, i32[n], hold; one that was not begun is ignored.

        Raises:
            ValueError: a table row is out of range.
        """
        call("prediction_forget", table_rows_params(self._handle, table_rows))

    def propose(self, token_table: I32, rows: DraftRows) -> DraftTokens:
        """Advance in the predicted texts by the committed tokens, and copy the tokens that follow there.

        An output that leaves its text is found again after replaced, deleted or inserted tokens: where most of its
        last tokens agree among the next 64, or where its last four occur. Until four tokens agree, two drafts are
        made, and two more per token that agreed.

        Args:
            token_table: i32[num_table_rows, max_tokens_per_row], committed tokens. They must not have changed since
                they were first seen here.

        Returns:
            At most max_draft_len[r] drafts in row r, none in one that was not begun.

        Raises:
            ValueError: a shape or dtype disagrees, a count or a row is out of range, or its tokens became fewer.

        Source: arXiv:2304.04487 (drafts from a reference, by the output's last tokens).
        """
        return self._propose.propose(token_table, rows)

    def num_bytes(self) -> int:
        """Return the memory of all texts."""
        function = library().fdsd_prediction_num_bytes
        function.restype = ctypes.c_int64
        return int(function(self._handle))
