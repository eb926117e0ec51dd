"""A source of drafts that runs a model: called only for rows whose drafts are expected to be worth the call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import address, pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.cost import CallTimes, DraftCost
from fastdeploy_sd.spec_decode.control.decision import MAX_STEP_DRAFTS, DraftTimes
from fastdeploy_sd.spec_decode.proposer import DraftProbabilities, DraftRequest, ProposeInput, Proposer, TargetStep
from fastdeploy_sd.types import F32, I32, DraftTokens

# The acceptance prior of a trial: high, so that the source is tried wherever it could pay.
_TRIAL_PRIOR, _TRIAL_DRAFTS = 0.9, 2
# The acceptance prior until the source has made so many drafts: the usual rate of draft layers.
_FIRST_PRIOR, _FIRST_DRAFTS = 0.8, 64
_NUM_OUTCOMES = 3
_NEVER = _NO_LIMIT = np.iinfo(np.int32).max
# Calls that a filled slot of a model that fills late is expected to serve.
_CATCH_UP_CALLS = 32
# At most so many steps are skipped before `wanted` is called again, after the source was not worth its time.
_MOST_SKIPPED = 15

# Steps of one trial of a source that was not worth its time; the first and the longest pause before it, in steps.
_TRIAL_STEPS, _FIRST_PAUSE, _LONGEST_PAUSE = 4, 64, 4096


class Trials:
    """When to try a source that was not worth its time: with a pause that doubles each time."""

    def __init__(self) -> None:
        self._pause = self._next_pause = _FIRST_PAUSE
        self._num_left = 0

    def note_wanted(self) -> None:
        self._pause = self._next_pause = _FIRST_PAUSE
        self._num_left = 0

    def is_due(self, num_steps: int) -> bool:
        """Return whether a trial is due, as the source was not worth its time in so many steps."""
        if self._num_left > 0:
            self._num_left -= 1
            return True
        self._pause -= num_steps
        if self._pause > 0:
            return False
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._pause, self._num_left = self._next_pause, _TRIAL_STEPS - 1
        return True


class ModelDraftSource:
    """One method that runs a model, for all requests that may have its drafts.

    It gets every step, and calls the method in few. Hidden rows for draft layers are kept without a call. Their KV must
    be filled along a prompt, and before a block is full. A model that reads only tokens fills its KV when it drafts,
    perhaps for a whole prompt; that time is charged to this call and later ones. One without KV has nothing to fill.

    Args:
        max_unfilled: slots of a request besides its newest that a call fills at most.
        max_drafts: of a row's chain; None = as many as the method has slots for.
        fills_late: whether the model is of the second or third kind.

    Attributes:
        seconds: of drafting since this was last set to 0, without the time that KV needs anyway.
        deferred_s: seconds of drafting since then that later calls are charged for.
    """

    def __init__(
        self,
        method: Proposer,
        max_num_seqs: int,
        block_size: int,
        max_unfilled: int = _NO_LIMIT,
        *,
        max_drafts: int | None = None,
        fills_late: bool = False,
    ) -> None:
        self._method, self._block_size = method, block_size
        self._max_draft_len = method.num_lookahead_slots if max_drafts is None else max_drafts
        self._max_unfilled = max_unfilled
        self.cost, self._trials = DraftCost(), Trials()
        self._fills_late, self._owed_s = fills_late, 0.0
        self.seconds = self.deferred_s = 0.0
        self._num_to_skip = self._num_skipped = self._num_drafts = 0
        # By table row: tokens at its begin; filled KV slots; the number of tokens at which a call is due.
        self._num_begun, self._num_filled = np.zeros((2, max_num_seqs), np.int32)
        self._due = np.full(max_num_seqs, _NEVER, np.int32)
        self._outcome = np.zeros(_NUM_OUTCOMES, np.float64)
        self._draft_prob = np.zeros(max_num_seqs * max(self._max_draft_len, 1), np.float32)
        self._wants: BoundCall | None = None

    @property
    def num_lookahead_slots(self) -> int:
        """See Proposer."""
        return self._method.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            self._num_begun[request.table_row] = request.num_tokens
            self._num_filled[request.table_row] = request.num_draft_slots
            self._due[request.table_row] = _NEVER if self._fills_late else 0
        self._method.begin(requests)

    def forget(self, table_rows: I32) -> None:
        self._due[table_rows] = _NEVER
        self._method.forget(table_rows)

    def num_steps_until_due(self, x: ProposeInput) -> int:
        """Return how many further steps of one token per row need no call; x: all rows decode."""
        if self._fills_late:
            return _NEVER
        num_run = x.num_tokens - 1
        return int((self._block_size - 1 - num_run % self._block_size).min(initial=self._block_size))

    def is_backing_off(self) -> bool:
        """Whether this step skips `wanted`: the source was not worth its time, and no other source offered drafts."""
        self._num_skipped += 1
        return self._num_skipped <= self._num_to_skip

    def limits(self, x: ProposeInput) -> I32:
        """Return i32[R], the most drafts of each row: none after a prefix, which the model has not run."""
        found = np.minimum(x.max_draft_len, self._max_draft_len)
        return found if x.prefix is None else np.where(np.diff(x.prefix.cu_num_draft) == 0, found, 0).astype(np.int32)

    def wanted(
        self, x: ProposeInput, policy: DraftController, source: int, times: DraftTimes, speed: float, num_outputs: int
    ) -> tuple[I32, float]:
        """Return how many drafts of each row are worth asking for, and the acceptance probability at which they end.

        Args:
            source: the plane of this source.
            times: of the next step, in ms; steps take `speed` times as long now as when they were measured.
            num_outputs: see DraftController.decide.
        """
        num_steps, self._num_skipped = max(self._num_skipped, 1), 0
        limits = self.limits(x)
        accept_prior = _FIRST_PRIOR if self._num_drafts < _FIRST_DRAFTS else 0.0
        how = (speed, accept_prior, self._max_draft_len, num_outputs, _CATCH_UP_CALLS if self._fills_late else 1)
        found, gain, least, num_others = self._worth(x, policy, source, times, how, limits)
        if gain > 1:
            self._num_to_skip = 0
            self._trials.note_wanted()
            return found, least
        self._num_to_skip = 0 if num_others else min(2 * self._num_to_skip + 1, _MOST_SKIPPED)
        if self._trials.is_due(num_steps):
            self._num_to_skip = 0
            trial = (speed, _TRIAL_PRIOR, min(_TRIAL_DRAFTS, self._max_draft_len), num_outputs, 1)
            found, _, _, _ = self._worth(x, policy, source, times, trial, limits)
        return found, 0.0

    def _worth(
        self,
        x: ProposeInput,
        policy: DraftController,
        source: int,
        times: DraftTimes,
        how: tuple[float, float, int, int, int],
        limits: I32,
    ) -> tuple[I32, float, float, int]:
        """Return drafts per row, the expected gain, the least acceptance probability, and other sources' drafts."""
        speed, accept_prior, max_drafts, num_outputs, num_calls = how
        if self._wants is None:
            params = struct_type("ControllerWantsParams")(
                controller=policy.handle, source=source, max_num_chosen=MAX_STEP_DRAFTS, outcome=address(self._outcome)
            )
            self._wants = BoundCall("controller_wants", params)
        call: CallTimes = self.cost.times(speed)
        found, num_rows = np.zeros(len(x.table_rows), np.int32), len(x.table_rows)
        catch_up = self._num_unfilled(x) * (call.row / num_calls)
        p = self._wants.params
        p.num_rows, p.num_outputs = num_rows, num_outputs
        p.max_drafts, p.min_acceptance_prior = max_drafts, accept_prior
        p.table_rows = pointer("table_rows", x.table_rows, (num_rows,), np.int32)
        p.max_draft_len = pointer("max_draft_len", limits, (num_rows,), np.int32)
        p.catch_up = pointer("catch_up", catch_up, (num_rows,), np.float64)
        p.num_wanted = pointer("num_wanted", found, (num_rows,), np.int32)
        p.curve, p.num_times = address(times.curve), len(times.curve)
        p.num_step_rows, p.fixed = times.num_rows, times.fixed
        p.per_draft, p.any_draft = times.per_draft, times.any_draft
        p.first, p.per_row, p.per_pass, p.per_pass_row = call
        self._wants.run()
        gain, least, num_others = self._outcome.tolist()
        return found, gain, least, int(num_others)

    def keep_up(self, x: ProposeInput) -> None:
        """Make no drafts in a step; fill KV as `draft` does."""
        if (_target(x).num_valid >= self._due.take(x.table_rows)).any():
            none = np.zeros(len(x.table_rows), np.int32)
            self.draft(x, none, none.astype(np.float32))

    def draft(self, x: ProposeInput, limits: I32, min_survival: F32) -> tuple[DraftTokens, F32]:
        """Draft for a whole step, and fill the KV of its other rows where that is due.

        Args:
            limits: i32[R], drafts of each row's chain at most.
            min_survival: f32[R], see DraftProbabilities.

        Returns:
            The drafts, and f32[D], how probable each is; valid until the next call.
        """
        begin = time.perf_counter()
        target = _target(x)
        ran = (limits > 0) | (target.num_valid >= self._due.take(x.table_rows))
        max_drafts = np.where(limits > 0, x.max_draft_len, 0).astype(np.int32)
        if max_drafts.sum() > len(self._draft_prob):
            self._draft_prob = np.zeros(max_drafts.sum(), np.float32)
        probabilities = DraftProbabilities(min_survival, self._draft_prob, max_drafts)
        asked = replace(x, max_draft_len=limits, probabilities=probabilities)
        drafts = self._method.propose(asked)
        seconds, num_drafting = time.perf_counter() - begin, int((limits > 0).sum())
        chains = drafts.chains()
        num_unfilled, num_passes = int(self._num_unfilled(x)[ran].sum()), int(np.diff(chains.cu_num_draft).max())
        if num_drafting:
            self.seconds += seconds if not self._fills_late else self._charged(seconds, num_unfilled, limits)
            self._num_drafts += len(chains.token_ids)
        if num_drafting and not (target.num_computed_tokens < self._num_begun[x.table_rows]).any():
            self.cost.observe(num_drafting, num_passes, 1e3 * seconds, num_unfilled)
        self._note_filled(x, ran & (target.num_valid > target.num_computed_tokens))
        return drafts, self._draft_prob[: len(drafts.token_ids)]

    def _charged(self, seconds: float, num_unfilled: int, limits: I32) -> float:
        """Return what a call is charged: its time without filling KV, and a share of what filling has taken so far."""
        times, num_rows, num_passes = self.cost.times(1.0), int((limits > 0).sum()), int(limits.max())
        share = times.of(num_rows, num_passes) / times.of(num_rows, num_passes, num_unfilled)
        filling_s = seconds * (1 - share)
        self._owed_s += filling_s
        charged_s = self._owed_s / _CATCH_UP_CALLS
        self._owed_s -= charged_s
        self.deferred_s += filling_s - charged_s
        return seconds - filling_s + charged_s

    def _num_unfilled(self, x: ProposeInput) -> I32:
        """Return i32[R], the tokens whose KV a call fills, without the newest one."""
        num_unfilled = x.num_tokens - 1 - self._num_filled[x.table_rows]
        return np.asarray(num_unfilled.clip(0, self._max_unfilled), np.int32)

    def _note_filled(self, x: ProposeInput, ran: npt.NDArray[np.bool_]) -> None:
        """Note what is filled; along a prompt and when the next block is full, a call is due."""
        t, rows = _target(x), x.table_rows[ran]
        end = np.minimum(np.minimum(t.num_valid + 1, x.num_tokens), t.num_kv_slots)[ran]
        self._num_filled[rows] = end
        is_prompt = t.num_valid[ran] < self._num_begun[rows]
        if self._fills_late:
            return
        self._due[rows] = np.where(is_prompt, 0, (end // self._block_size + 1) * self._block_size)


def _target(x: ProposeInput) -> TargetStep:
    assert x.target is not None, "draft layers go on from what the model ran"
    return x.target
