"""Recurrent states of the toy model: what a state holds is how many tokens, and the hash of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.types import LIVE_STATE, NO_STATE, RequestId, SchedulerOutput
from tests.doubles.toy_model import extend_prefix, hash_prefix, root_prefix

_State = tuple[int, int]


@dataclass(frozen=True)
class _Live:
    """A live state, and the drafts after it."""

    state: _State
    drafts: tuple[int, ...]


class ToyStates:
    """Live states and snapshots; a plan that starts a row from a wrong state is an AssertionError.

    Attributes:
        num_written: snapshots, whatever they were worth. num_taken: by first steps.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._snapshots: list[_State | None] = [None] * num_snapshots
        self._live: dict[RequestId, _Live] = {}
        self.num_written = self.num_taken = 0

    def forget(self, request_id: RequestId) -> None:
        """Drop a request's live state, if it has one."""
        self._live.pop(request_id, None)

    def run(
        self,
        plan: SchedulerOutput,
        token_ids: Mapping[RequestId, Sequence[int]],
        digests: Mapping[RequestId, str],
    ) -> None:
        """Check where rows begin, write snapshots that are reached, spoil those that are not, and move on.

        `digests`: of the requests' adapters.
        """
        assert plan.states is not None, "a plan without states"
        states, written = plan.states, plan.states.snapshot_ids.tolist()
        read = {n for n in states.initial.tolist() if n >= 0}
        assert len(set(written)) == len(written), "two snapshots in one place"
        assert read.isdisjoint(written), "a snapshot is read and written"
        for r, name in enumerate(plan.request_ids):
            begin, num_new = int(plan.num_computed_tokens[r]), int(plan.num_new_tokens[r])
            wanted = hash_prefix(token_ids[name][:begin], digests[name])
            found = self._source(name, int(states.initial[r]), begin, root_prefix(digests[name]))
            assert found == (begin, wanted), f"{name}: state {found}, expected {(begin, wanted)}"
            drafts = plan.draft.row(r).tolist()
            certain = begin + num_new - len(drafts)
            after = {begin: wanted}
            for i, token_id in enumerate([*token_ids[name][begin:certain], *drafts], begin):
                after[i + 1] = extend_prefix(after[i], token_id)
            first, last = states.cu_snapshots[r : r + 2].tolist()
            ends = states.snapshot_ends[first:last].tolist()
            assert all(np.diff([begin, *ends]) > 0), f"{name}: ends {ends} after {begin} tokens"
            for end, snapshot in zip(ends, written[first:last], strict=True):
                self._snapshots[snapshot] = (end, after[end]) if end in after else None
                self.num_written += end in after
            self._live[name] = _Live((certain, after[certain]), tuple(drafts))

    def _source(self, name: RequestId, initial: int, begin: int, root: int) -> _State | None:
        if initial == NO_STATE or initial >= 0:
            assert name not in self._live, f"{name} begins anew, but has a state"
            self.num_taken += initial >= 0
            return (0, root) if initial == NO_STATE else self._snapshots[initial]
        assert initial == LIVE_STATE
        live = self._live[name]
        count, prefix = live.state
        assert 0 <= begin - count <= len(live.drafts), f"{name}: {begin} tokens, live state of {count}"
        for token_id in live.drafts[: begin - count]:
            prefix = extend_prefix(prefix, token_id)
        return begin, prefix
