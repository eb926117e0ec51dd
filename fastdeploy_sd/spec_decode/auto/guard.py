"""Whether drafting pays at all: steps with drafts against plain ones that are put between them. Knows no drafts.

By number of requests, in classes of a factor of two: what pays for one request may not pay for thirty.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median

# Steps with drafts between two plain ones, and until the gain is looked at.
_STEPS_PER_PLAIN = 48
_STEPS_PER_LOOK = 96
# Plain steps that are remembered: the machine's speed changes.
_PLAIN_STEPS = 17
# A step that took so many times as long as was to be expected was interrupted; it counts as this. The longer a step is,
# the more often it is: so means are compared, of both kinds, and no median with a mean.
_LONGEST_STEP = 4.0
# Off when the gain was less so many times in a row: one look may have had bad luck.
_LEAST_GAIN, _BAD_LOOKS = 0.98, 2
# Steps for which a class stays off after its first failure; twice as many after each further one.
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 16384


class _Class:
    """One class of load."""

    def __init__(self) -> None:
        self.plain_s: deque[float] = deque(maxlen=_PLAIN_STEPS)  # seconds per request of plain steps
        self.longest_s = 0.0  # per request, that a plain step counts as
        self.num_since_plain = _STEPS_PER_PLAIN
        self.num_tokens = self.num_steps = 0
        self.seconds = 0.0
        self.gain = 0.0
        self.num_bad_looks = self.pause = 0
        self.next_pause = _FIRST_PAUSE

    def note_plain(self, seconds: float) -> None:
        """A plain step took this long per request."""
        self.plain_s.append(seconds)
        self.longest_s = _LONGEST_STEP * median(self.plain_s)

    def look(self) -> None:
        """Compare, and start anew."""
        if self.plain_s and self.seconds > 0:
            self.gain = self.num_tokens / self.seconds * mean(min(s, self.longest_s) for s in self.plain_s)
            self.num_bad_looks = self.num_bad_looks + 1 if self.gain < _LEAST_GAIN else 0
            if self.num_bad_looks >= _BAD_LOOKS:
                self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, _LONGEST_PAUSE)
            elif self.num_bad_looks == 0:
                self.next_pause = _FIRST_PAUSE
        self.num_tokens = self.num_steps = 0
        self.seconds = 0.0


class Guard:
    """Told of every step, asked before the next one."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._latest = _Class()

    @property
    def gain(self) -> float:
        """Tokens per second over those of plain steps, in the class of the latest step; 0 = not known yet."""
        return self._latest.gain

    def observe(
        self, num_requests: int, num_tokens: int, num_drafts: int, seconds: float, stretch: float = 1.0
    ) -> None:
        """A step is over.

        Args:
            num_tokens: that it brought, of all requests; 0 = it cannot be compared: it had parts of prompts in it, or
                requests that came or went.
            num_drafts: that were in it.
            seconds: everything included that the step would not have taken without drafting.
            stretch: expected time of the step over that of a plain one, >= 1.
        """
        number = num_requests.bit_length()
        found = self._classes.get(number)
        if found is None:
            found = self._classes[number] = _Class()
        self._latest = found
        if num_drafts == 0:
            found.num_since_plain = 0
            found.pause = max(found.pause - 1, 0)
            if num_tokens:
                found.note_plain(seconds / num_tokens)
            return
        if num_tokens == 0 or not found.plain_s:
            return
        found.num_since_plain += 1
        found.num_steps += 1
        found.num_tokens += num_tokens
        found.seconds += min(seconds, stretch * num_requests * found.longest_s)
        if found.num_steps >= _STEPS_PER_LOOK:
            found.look()

    def allows_drafts(self, num_requests: int) -> bool:
        """Whether the next step of so many requests may have drafts: not while off, and not when a plain one is due."""
        found = self._classes.get(num_requests.bit_length())
        return found is None or (found.pause == 0 and found.num_since_plain < _STEPS_PER_PLAIN)

    def is_off(self, num_requests: int) -> bool:
        """Whether steps of so many requests are plain because drafts did not pay."""
        found = self._classes.get(num_requests.bit_length())
        return found is not None and found.pause > 0
