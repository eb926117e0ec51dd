"""Several methods, and the policy that chooses among their offers. Knows no method by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.cost import StepTimes
from fastdeploy_sd.spec_decode.control.decision import Decision, DraftTimes
from fastdeploy_sd.spec_decode.control.model_draft_source import ModelDraftSource
from fastdeploy_sd.spec_decode.control.offers import OfferTable
from fastdeploy_sd.spec_decode.methods.native_texts import TextProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import F32, I32, DraftTokens, chain_parents
from fastdeploy_sd.types.draft_methods import METHODS, DraftSource


class AutoProposer(Proposer):
    """Asks every method for drafts in every step, and drafts what the policy chooses: one native call.

    Where a method makes trees, the drafts of all become one tree per request.

    Args:
        cost: times of steps that have only the rows of a call; None = the controller's params have them.
        model_source: its drafts come between `ask` and `choose`; None = none.
        lent: further methods to ask, which their owner begins, forgets and closes.
    """

    def __init__(
        self,
        methods: Sequence[tuple[DraftSource, TextProposer]],
        cost: StepTimes | None,
        max_num_seqs: int,
        max_draft_len: int,
        model_source: DraftSource | None = None,
        lent: Sequence[tuple[DraftSource, TextProposer]] = (),
    ) -> None:
        self._methods = [method for _, method in methods]
        makes_trees = any(method.makes_trees for method in self._methods)
        self._cost = cost
        drafters = {source: method.native_drafter for source, method in (*methods, *lent)}
        sources = [*drafters, *([] if model_source is None else [model_source])]
        self._offers = OfferTable(len(sources), max_num_seqs, max_draft_len, has_trees=makes_trees)
        self._model_source, self._has_model_offer = len(drafters), False  # its plane
        self.controller = DraftController(
            max_num_seqs, max_draft_len, sources, drafters, _covered([s for s, _ in methods]), makes_trees=makes_trees
        )

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for method in self._methods:
            method.begin(requests)
        self.controller.begin(np.array([request.table_row for request in requests], np.int32))

    def propose(self, x: ProposeInput) -> DraftTokens:
        return self.decide(x).drafts

    def decide(self, x: ProposeInput) -> Decision:
        """Return the drafts that are worth their time; raises ValueError where a method refused the rows."""
        self._clear_model_offer()
        return self.controller.decide(x, self._offers, self._times(x), len(x.table_rows))

    def bind(self, x: ProposeInput) -> None:
        """Write these rows to the controller's params, without offers of the model source."""
        self._clear_model_offer()
        self.controller.bind(x, self._offers)

    def ask(self, x: ProposeInput, model_source: ModelDraftSource, speed: float) -> tuple[I32, float]:
        """Ask the methods, and return the model source's `wanted`. `choose` follows."""
        self._clear_model_offer()
        self.controller.offer(x, self._offers)
        times, num_outputs = self._times(x), len(x.table_rows)
        if times is None:
            times, num_outputs = self.controller.times, self.controller.params.num_outputs
        return model_source.wanted(x, self.controller, self._model_source, times, speed, num_outputs)

    def choose(self, x: ProposeInput, drafts: DraftTokens, draft_prob: F32) -> Decision:
        """Choose from the offers and the model source's drafts for the same rows, with their probabilities."""
        num_rows, count = len(x.table_rows), len(drafts.token_ids)
        plane = self._offers.offer(self._model_source, num_rows)
        plane.token_ids[:count], plane.draft_prob[:count] = drafts.token_ids, draft_prob
        plane.cu_num_draft[:] = drafts.cu_num_draft  # evidence stays 0: it has matched nothing
        if plane.parents is not None:
            plane.parents[:count] = chain_parents(drafts.cu_num_draft) if drafts.parents is None else drafts.parents
        self._has_model_offer = True
        return self.controller.choose(x, self._offers, self._times(x), num_rows)

    def _clear_model_offer(self) -> None:
        if self._has_model_offer:
            self._offers.clear(self._model_source)
            self._has_model_offer = False

    def _times(self, x: ProposeInput) -> DraftTimes | None:
        if self._cost is None:
            return None
        return self._cost.times(len(x.table_rows), len(x.table_rows), sum(x.num_tokens.tolist()))

    def forget(self, table_rows: I32) -> None:
        for method in self._methods:
            method.forget(table_rows)
        self.controller.forget(table_rows)

    def close(self) -> None:
        for method in self._methods:
            method.close()


def _covered(sources: Sequence[DraftSource]) -> list[DraftSource]:
    """Return the sources whose drafts another of these mostly has."""
    methods = [method for method in METHODS.values() if method.source in sources]
    names = {method.name for method in methods}
    return [method.source for method in methods if method.source is not None and method.subsumed_by in names]
