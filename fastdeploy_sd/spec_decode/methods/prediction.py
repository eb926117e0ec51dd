"""Drafts from what a client predicts as its answer, followed by a native kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.device.arrays import pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call
from fastdeploy_sd.spec_decode.methods.native_texts import NativeTexts, TextProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, Proposer
from fastdeploy_sd.types import I32, DraftSource


class PredictionDrafter(NativeTexts):
    """The predicted outputs of some table rows, and the position of each row in its text: 20 to 32 bytes per token.

    An output that leaves its text is found again where most of its last tokens agree among the next 64, or where its
    last four occur. Until four tokens agree, two drafts are made, and two more per token that agreed.

    Source: arXiv:2304.04487 (drafts from a reference, by the output's last tokens).
    """

    def __init__(self, num_table_rows: int) -> None:
        super().__init__("prediction", num_table_rows=num_table_rows)

    def begin(self, table_row: int, first_output: int, predicted: I32) -> None:
        """Begin a request in a table row; raises ValueError where that is out of range, or memory is exhausted.

        Args:
            first_output: index of the output's first token: the length of the prompt.
            predicted: i32[n], the predicted output.
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


class PredictionProposer(TextProposer):
    """A PerRequestMethod for requests with a predicted output; see PredictionDrafter."""

    source, is_certain = DraftSource.PREDICTION, False

    def __init__(self, max_num_seqs: int) -> None:
        self._texts = self._drafter = PredictionDrafter(max_num_seqs)

    @property
    def proposer(self) -> Proposer:
        return self

    def serves(self, request: DraftRequest) -> bool:
        return len(request.prediction_token_ids) > 0

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Index the predicted texts; the output of a request that comes back is read in its first step."""
        for request in requests:
            self._drafter.begin(request.table_row, request.num_prompt_tokens, request.prediction_token_ids)
