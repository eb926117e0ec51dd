"""Whether drafting pays: steps with drafts against plain ones that are put between them. Knows no drafts.

By number of requests, in classes of a factor of two: what pays for one request may not pay for thirty.

A machine's speed changes from one second to the next, and plain steps are rare where drafts pay: so before more is
demanded of drafts that seem to lose, they are compared with plain steps that take turns with them.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

# Steps with drafts between two plain ones, and until the gain is told.
_STEPS_PER_PLAIN = 48
_STEPS_PER_LOOK = 32
# Steps that were to be plain and had others' drafts in them, until that is given up for the time being.
_MOST_PUT_OFF = 4
# Plain steps that are remembered: the machine's speed changes.
_PLAIN_STEPS = 17
_FEW_PLAIN_STEPS = 4
# So many comparable steps back a plain one was still run on the same machine, as far as that is known. Counted in
# others too, four would never be found under a load where requests come or go in most steps.
_RECENT_STEPS = 64
# A step that took so many times as long as was to be expected was interrupted; it counts as this. The longer a step is,
# the more often it is: so means are compared, of both kinds, and no median with a mean.
_LONGEST_STEP = 2.0
# What drafts must be expected to bring, tokens per time over those of plain decoding: a little at least, as drafts that
# just break even are a risk for nothing, and the more the more they lost.
LEAST_DEMAND = 1.03
_DEMANDS = (LEAST_DEMAND, 1.05, 1.12, 1.25, 1.5, 2.0, math.inf)
# Plain steps' time that drafts may lose before more is demanded, and bring before less is.
_MOST_LOSS = 2.0
# Steps after which less is demanded all the same, and twice as many each time that turned out to be wrong.
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 16384
# Plain steps' time that asking is believed to bring at first, each time, and at most, so that a text that ends with
# much of it does not speak for the next; and the weight of what it brought last.
_FIRST_WORTH, _MOST_WORTH, _WORTH_RATE = 0.5, 0.5, 1 / 16
# Asking that took more of a plain step was interrupted, and counts as this.
_MOST_ASKING = 0.25


class _Class:
    """One class of load."""

    def __init__(self) -> None:
        self.plain_s: deque[float] = deque(maxlen=_PLAIN_STEPS)  # seconds per request of plain steps
        self.longest_s = self.mean_s = 0.0  # per request: what a plain step counts as, and what one takes
        self.num_since_plain = _STEPS_PER_PLAIN
        self.num_put_off = self.num_wanted = 0  # num_wanted: plain steps that are to take turns with drafts
        self.num_compared = 0
        self.plain_at: deque[int] = deque(maxlen=_FEW_PLAIN_STEPS)  # num_compared at the latest of plain_s
        self.num_tokens = self.num_steps = 0
        self.seconds = self.gain = 0.0
        self.level = 0
        self.lost = self.won = 0.0  # plain steps' time, since it was less than nothing
        self.is_trial = False  # less is demanded though nothing was won
        self.pause = self.next_pause = _FIRST_PAUSE
        self.worth = _FIRST_WORTH

    def note_plain(self, seconds: float) -> None:
        """A plain step took this long per request."""
        self.plain_s.append(seconds)
        self.plain_at.append(self.num_compared)
        self.num_wanted = max(self.num_wanted - 1, 0)
        self.longest_s = _LONGEST_STEP * median(self.plain_s)
        self.mean_s = sum([min(s, self.longest_s) for s in self.plain_s]) / len(self.plain_s)

    @property
    def is_plain_due(self) -> bool:
        """Whether the next step is to be plain, so that there is something to compare with."""
        return self.num_since_plain >= (1 if self.num_wanted else _STEPS_PER_PLAIN)

    def note_any_drafts(self) -> None:
        """A step had drafts in it. Where a plain one was due they are of requests that did not ask us."""
        if not self.is_plain_due:
            self.num_since_plain += not self.plain_s  # else those that are compared are counted
            return
        self.num_put_off += 1
        if self.num_put_off == _MOST_PUT_OFF:
            self.num_since_plain = self.num_put_off = self.num_wanted = 0

    def note_drafts(self, num_tokens: int, seconds: float) -> None:
        """A step with drafts brought so many tokens in so long."""
        self.num_since_plain += 1
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        if self.num_steps >= _STEPS_PER_LOOK:
            self.gain = self.num_tokens / self.seconds * self.mean_s
            self.num_tokens = self.num_steps = 0
            self.seconds = 0.0

    def note_asked(self, asking_s: float, plain_s: float) -> None:
        """Drafts were asked for, and none was worth a step."""
        self.lost = min(self.lost + asking_s / plain_s, _MOST_LOSS)  # nothing but drafts changes a demand
        self.note_worth(-min(asking_s / plain_s, _MOST_ASKING))

    def note_worth(self, gain: float) -> None:
        """Asking brought so much, in plain steps."""
        self.worth = min(self.worth + _WORTH_RATE * (gain - self.worth), _MOST_WORTH)

    def weigh(self, lost: float) -> None:
        """Drafting lost so much time, in plain steps; negative = it won some.

        Source: two cumulative sums, one for each side (Page, Continuous Inspection Schemes, 1954).
        """
        self.note_worth(-lost)
        self.lost, self.won = max(0.0, self.lost + lost), max(0.0, self.won - lost)
        if self.num_wanted == 0 and self.lost > _MOST_LOSS:
            self._believe_loss()
        elif self.won > _MOST_LOSS:
            self.level, self.is_trial = max(self.level - 1, 0), False
            self.pause = self.next_pause = _FIRST_PAUSE
            self.lost = self.won = 0.0

    def _believe_loss(self) -> None:
        """Demand more, if enough plain steps were run on the same machine; else see what they take now."""
        num_recent = sum(self.num_compared - at <= _RECENT_STEPS for at in self.plain_at)
        if num_recent == _FEW_PLAIN_STEPS:
            self.level = min(self.level + 1, len(_DEMANDS) - 1)
            if self.is_trial:
                self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)
            self.pause, self.is_trial = self.next_pause, False
        else:
            self.num_wanted = _FEW_PLAIN_STEPS - num_recent
            while len(self.plain_s) > num_recent:
                self.plain_s.popleft()
        self.lost = self.won = 0.0

    def pass_time(self, num_steps: int) -> None:
        """So many steps went by."""
        if self.level == 0:
            return
        self.pause -= num_steps
        if self.pause <= 0:
            self.level, self.pause, self.is_trial = self.level - 1, self.next_pause, True


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
        self,
        num_requests: int,
        num_tokens: int,
        num_drafts: int,
        seconds: float,
        *,
        asking_s: float = 0.0,
        stretch: float = 1.0,
    ) -> None:
        """A step is over.

        Args:
            num_tokens: that it brought, of all requests; 0 = it cannot be compared: it had parts of prompts in it, or
                requests that came or went.
            num_drafts: that were in it.
            seconds: everything but what drafting took.
            asking_s: seconds that drafting took.
            stretch: expected time of the step over that of a plain one, >= 1.
        """
        number = num_requests.bit_length()
        found = self._classes.get(number)
        if found is None:
            found = self._classes[number] = _Class()
        self._latest = found
        found.pass_time(1)
        found.num_compared += num_tokens > 0
        if num_drafts == 0:
            found.num_since_plain = found.num_put_off = 0
            if num_tokens:
                found.note_plain(seconds / num_tokens)
        else:
            found.note_any_drafts()
        if num_tokens == 0 or not found.plain_s:
            return
        plain_s = num_requests * found.mean_s
        if num_drafts == 0:
            found.note_asked(asking_s, plain_s)
            return
        seconds = min(seconds + asking_s, stretch * num_requests * found.longest_s)
        found.note_drafts(num_tokens, seconds)
        found.weigh(seconds / plain_s - num_tokens / num_requests)

    def rest(self, num_requests: int, num_steps: int) -> None:
        """So many plain steps went by that it is not told of."""
        found = self._classes.get(num_requests.bit_length())
        if found is not None:
            found.pass_time(num_steps)

    def knows(self, num_requests: int) -> bool:
        """Whether enough plain steps of so many requests were observed to tell what one takes."""
        found = self._classes.get(num_requests.bit_length())
        return found is not None and len(found.plain_s) >= _FEW_PLAIN_STEPS

    def note_asked(self, num_requests: int, asking_s: float) -> None:
        """A plain step is over that was asked in for nothing, and took what they take: what `observe` learns of it."""
        found = self._latest = self._classes[num_requests.bit_length()]
        found.num_since_plain = 0
        found.pass_time(1)
        found.note_asked(asking_s, num_requests * found.mean_s)

    def is_worth_asking(self, num_requests: int) -> bool:
        """Whether asking in steps of so many requests has brought more lately than it took."""
        found = self._classes.get(num_requests.bit_length())
        return found is None or found.worth > 0

    def least_gain(self, num_requests: int) -> float:
        """What drafts must be expected to bring in the next step of so many requests: 1 or more.

        Infinite where it is to be plain, as one is due, or because drafts lose whatever is expected of them.
        """
        found = self._classes.get(num_requests.bit_length())
        if found is None:
            return _DEMANDS[0]
        return math.inf if found.is_plain_due else _DEMANDS[found.level]

    def is_off(self, num_requests: int) -> bool:
        """Whether steps of so many requests are plain because drafts did not pay."""
        found = self._classes.get(num_requests.bit_length())
        return found is not None and math.isinf(_DEMANDS[found.level])
