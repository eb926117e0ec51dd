"""Backoff: when to try drafting again after it was not worth its time. Knows no drafts."""

from __future__ import annotations

import math

# The share of time that asking may take where nothing is worth drafting, and the most steps skipped at once.
_ASKING_SHARE, _MOST_SKIPPED = 0.005, 24
# After n steps without drafts worth a step, n^2 over this many are skipped: none after two, then more each time.
_PLAIN_PER_SKIP = 8
_MOST_PLAIN = math.isqrt(_PLAIN_PER_SKIP * _MOST_SKIPPED) + 1
# Where there was no draft, the drafters are only probed, at most so many times, before everything is asked again.
_MOST_PROBES = 7
# Steps of one trial of a source that was not worth its time; the first and the longest pause before it, in steps.
_TRIAL_STEPS, _FIRST_PAUSE, _LONGEST_PAUSE = 4, 64, 4096


class Backoff:
    """Counts the steps that asked for drafts in vain, and says how many to skip.

    Attributes:
        num_probes: how many probes are left before everything is asked again.
    """

    def __init__(self) -> None:
        self._num_plain = self.num_probes = 0

    def note_drafts(self) -> None:
        """There were drafts worth a step."""
        self._num_plain //= 2
        self.num_probes = 0

    def note_plain(self, asking_s: float, step_s: float, *, is_worth_asking: bool, has_offers: bool) -> int:
        """Nothing was worth drafting; returns how many steps to skip.

        Args:
            asking_s, step_s: the time of asking, and of a step.
            is_worth_asking: False = skip as many steps as allowed.
            has_offers: whether there were drafts.
        """
        self.num_probes = 0 if has_offers else _MOST_PROBES
        skip_draft_steps = self._next(asking_s, step_s)
        return skip_draft_steps if is_worth_asking else _longest(asking_s, step_s)

    def note_probe(self, seconds: float, step_s: float) -> int:
        """A probe of this time found no draft; returns how many steps to skip."""
        self.num_probes -= 1
        return self._next(seconds, step_s)

    def _next(self, seconds: float, step_s: float) -> int:
        self._num_plain = min(self._num_plain + 1, _MOST_PLAIN)
        return min(self._num_plain**2 // _PLAIN_PER_SKIP, _longest(seconds, step_s))


def _longest(seconds: float, step_s: float) -> int:
    return min(int(seconds / (_ASKING_SHARE * max(step_s, 1e-9))), _MOST_SKIPPED)


class Trials:
    """When to try a source that was not worth its time: with a pause that doubles each time."""

    def __init__(self) -> None:
        self._pause = self._next_pause = _FIRST_PAUSE
        self._num_left = 0

    def note_wanted(self) -> None:
        """The source is worth its time."""
        self._pause = self._next_pause = _FIRST_PAUSE
        self._num_left = 0

    def is_due(self, num_steps: int) -> bool:
        """The source was not worth its time in so many steps; returns whether a trial is due."""
        if self._num_left > 0:
            self._num_left -= 1
            return True
        self._pause -= num_steps
        if self._pause > 0:
            return False
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._pause, self._num_left = self._next_pause, _TRIAL_STEPS - 1
        return True
