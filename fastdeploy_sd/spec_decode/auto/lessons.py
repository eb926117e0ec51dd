"""What steps that are over teach the guard and the model of times. Knows no drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy_sd.spec_decode.auto.guard import Guard
from fastdeploy_sd.spec_decode.auto.next_step import NextStep
from fastdeploy_sd.spec_decode.step_board import StepBoard


@dataclass(slots=True)
class NextStepNotes:
    """What is known of a step before it runs.

    Attributes:
        num_kv_tokens: in the contexts of the rows that drafts were chosen for.
        asking_s: what choosing its drafts took.
        choosing_s: the same without draft layers; 0 where none were chosen.
        predicted_s: what it is expected to take; 0 = nobody knows.
        stretch: expected time over that of a plain step.
        is_certain: whether all of its drafts are.
    """

    num_kv_tokens: int = 0
    asking_s: float = 0.0
    choosing_s: float = 0.0
    predicted_s: float = 0.0
    stretch: float = 1.0
    is_certain: bool = False

    def expect_nothing(self) -> None:
        """It is a plain step, as far as is known."""
        self.predicted_s, self.stretch, self.is_certain = 0.0, 1.0, False


class StepRecord(NamedTuple):
    """A step that is over.

    Attributes:
        num_requests, num_rows: that the model ran; rows are tokens, drafts and parts of prompts included.
        num_drafts: of the rows, whoever made them.
        num_new: tokens that it brought; 0 = it cannot be compared with others, see Guard.observe.
        num_kv_tokens: in the contexts of all requests afterwards.
        is_alone: nothing but the rows that drafts are chosen for was in it.
        goes_on: the step before it had the same rows.
        seconds: what it took, drafting left out.
        host_seconds: between it and the step before, drafting left out.
        asking_s, choosing_s, predicted_s, stretch: see NextStepNotes.
    """

    num_requests: int
    num_rows: int
    num_drafts: int
    num_new: int
    num_kv_tokens: int
    is_alone: bool
    goes_on: bool
    seconds: float
    host_seconds: float
    asking_s: float
    choosing_s: float
    predicted_s: float
    stretch: float


def step_over(
    board: StepBoard, notes: NextStepNotes, num_kv_tokens: int, *, is_alone: bool, goes_on: bool
) -> StepRecord:
    """Return the step that the board tells of, and that these notes were made of; the rest as StepRecord has it."""
    num_new = 0
    if is_alone and goes_on and not notes.is_certain:  # what is certain says nothing of guesses
        num_new = num_kv_tokens - notes.num_kv_tokens + board.num_forbidden
    return StepRecord(
        board.num_requests,
        board.num_tokens,
        max(0, board.num_tokens - board.num_prompt_tokens - board.num_requests),
        num_new,
        num_kv_tokens,
        is_alone,
        goes_on,
        board.seconds,
        board.host_seconds,
        notes.asking_s,
        notes.choosing_s,
        notes.predicted_s,
        notes.stretch,
    )


class Lessons:
    """Learns from steps, in their order.

    Args:
        times: told what steps take.
        guard: told what they bring.

    Attributes:
        predicted_s, measured_s: of all steps that were predicted.
    """

    def __init__(self, times: NextStep, guard: Guard) -> None:
        self._times, self._guard = times, guard
        self._put_off: list[StepRecord] = []
        self.predicted_s = self.measured_s = 0.0

    @property
    def num_put_off(self) -> int:
        """Steps whose times are to be learned from later."""
        return len(self._put_off)

    def learn(self, step: StepRecord, *, put_off: bool = False) -> None:
        """A step is over.

        Args:
            put_off: what it took may be learned with the next step that is not put off. What it brought is not.
        """
        self._put_off.append(step)
        if not put_off:
            self.catch_up()
        has_drafts = step.num_drafts > 0
        self._guard.observe(
            step.num_requests,
            step.num_new,
            step.num_drafts,
            step.seconds + self._times.host_s(step.num_requests, has_drafts=has_drafts),
            asking_s=step.asking_s,
            stretch=step.stretch,
        )

    def catch_up(self) -> None:
        """Learn what was put off."""
        for step in self._put_off:
            self._learn_times(step)
        self._put_off.clear()

    def _learn_times(self, step: StepRecord) -> None:
        times = self._times
        if step.choosing_s:
            times.observe_drafting(step.num_requests, step.choosing_s)
        if not step.is_alone:
            return
        if step.predicted_s:
            self.predicted_s += step.predicted_s
            self.measured_s += step.seconds
        times.observe(step.num_requests, step.num_rows, step.num_kv_tokens, step.seconds)
        if step.goes_on:
            times.observe_host(step.num_requests, step.host_seconds, has_drafts=step.num_drafts > 0)
