"""What the next step takes with all around it. Knows no drafts."""

from __future__ import annotations

from collections import deque

from fastdeploy_sd.spec_decode.auto.cost import CostModel, DraftTimes, LinearCost
from fastdeploy_sd.spec_decode.auto.usual_time import UsualTime
from fastdeploy_sd.spec_decode.step_board import StepBoard

# What a draft costs of a one-row step where nothing was measured.
_UNMEASURED_COST = 0.1
# The engine's part of a step with drafts over that of a plain one, at most.
_MOST_HOST = 2.0
# Tokens of context that the time of a step is not computed anew for.
_FEW_KV_TOKENS = 64


class NextStep:
    """The time of the next step, whatever else than the rows that are drafted for is in it. See StepTimes.

    Args:
        board: says what that is.

    Attributes:
        model: of the model's part; None = nothing was measured.
    """

    def __init__(self, board: StepBoard) -> None:
        self._board = board
        self.model: CostModel | None = None
        # The engine's part, between two steps, also of a step with drafts; choosing drafts.
        self._host, self._drafted_host, self._drafting = UsualTime(), UsualTime(), UsualTime()
        self._host_s: dict[tuple[int, bool], float] = {}  # what host_s returned since something was learned
        self._excess = _Excess()
        self._unmeasured = LinearCost(_UNMEASURED_COST)
        self._latest: tuple[tuple[int, ...], DraftTimes] | None = None

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """See StepTimes.times. Parts of prompts that are foreseen are in the step, and other requests' tokens.

        The same value comes again while nothing was learned, and contexts are hardly longer.
        """
        b, model = self._board, self.model
        num_all = b.num_requests
        num_rows += b.num_prompt_tokens_ahead + num_all - num_requests
        if model is None:
            return self._unmeasured.times(num_rows, num_all, num_kv_tokens)
        is_first = b.num_tokens - b.num_prompt_tokens <= num_all
        key = (num_rows, num_all, num_kv_tokens // _FEW_KV_TOKENS, is_first)
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        found = model.times(num_rows, num_all, num_kv_tokens)
        plain_s, drafted_s = (self.host_s(num_all, has_drafts=has) for has in (False, True))
        around_s = plain_s + self._drafting.seconds(num_all)
        found = found._replace(
            fixed=found.fixed + 1e3 * around_s / model.speed,
            any_draft=1e3 * (drafted_s - plain_s) / model.speed + (self._excess.ms(num_all) if is_first else 0.0),
        )
        self._latest = key, found
        return found

    def observe(self, num_requests: int, num_rows: int, num_kv_tokens: int, seconds: float) -> None:
        """A step of so many requests and nothing else is over, which had so many rows."""
        model = self.model
        self._latest = None
        if model is None:
            return
        expected, ms = model.expected(num_rows, num_requests, num_kv_tokens), 1e3 * seconds
        self._excess.observe(num_requests, ms, expected, has_drafts=num_rows > num_requests)
        model.observe(num_rows, num_requests, num_kv_tokens, ms)

    def observe_host(self, num_requests: int, seconds: float, *, has_drafts: bool) -> None:
        """A step of so many requests followed another one of them; in between the engine took so long."""
        self._latest = None
        self._host_s.clear()
        (self._drafted_host if has_drafts else self._host).observe(num_requests, seconds)

    def observe_drafting(self, num_requests: int, seconds: float) -> None:
        """Choosing drafts for so many requests took so long."""
        self._latest = None
        self._drafting.observe(num_requests, seconds)

    def host_s(self, num_requests: int, *, has_drafts: bool) -> float:
        """What the engine's part of a step takes, in seconds; of the rarer kind of steps little is known."""
        found = self._host_s.get((num_requests, has_drafts))
        if found is None:
            drafted_s = self._drafted_host.seconds(num_requests)
            plain_s = min(filter(None, (self._host.seconds(num_requests), drafted_s)), default=0.0)
            found = min(max(drafted_s, plain_s), _MOST_HOST * plain_s) if has_drafts else plain_s
            self._host_s[num_requests, has_drafts] = found
        return found

    def ms_around(self, num_requests: int, *, has_drafts: bool) -> float:
        """What a step in which drafts are chosen takes beside the model's part."""
        return 1e3 * (self.host_s(num_requests, has_drafts=has_drafts) + self._drafting.seconds(num_requests))


class _Excess:
    """What the first step with drafts behind plain ones takes longer than expected: its code is not in the caches.

    A rare kind of step is dearer than the same step again and again, as profiles have it. Only steps beside one another
    are compared, as a machine's speed changes from one second to the next. By number of requests in classes of a
    factor of two.
    """

    def __init__(self) -> None:
        self._of_class: dict[int, _ClassExcess] = {}

    def observe(self, num_requests: int, ms: float, expected_ms: float, *, has_drafts: bool) -> None:
        """A step took so long; `expected_ms`: as the machine was measured."""
        number = num_requests.bit_length()
        found = self._of_class.get(number)
        if found is None:
            found = self._of_class[number] = _ClassExcess()
        if has_drafts:
            found.observe_drafts(ms, expected_ms)
        else:
            found.observe_plain(ms / expected_ms)

    def ms(self, num_requests: int) -> float:
        """Return the excess, 0 or more, in milliseconds of the machine as it was measured."""
        found = self._of_class.get(num_requests.bit_length())
        return 0.0 if found is None else max(0.0, found.ms)


# Plain steps that one with drafts is compared with: of so few the quickest is what a quarter of them do not exceed.
_NUM_BEFORE = 3
# What a step may say, as a part of what was expected of it: if all were interrupted, drafts must not end for good.
_MOST_SHARE = 0.5
# Steps that count, those that must have been seen, and the part of them that took less than what is told: beside busy
# neighbours more than half of all steps are interrupted. Plain steps after which one is forgotten.
_NUM_KEPT, _FEWEST, _QUIET_PART, _STEPS_PER_AGE = 16, 3, 0.25, 4


class _ClassExcess:
    """Of one class.

    Attributes:
        ms: the lower quartile of the latest excesses; 0 until enough were seen.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_NUM_BEFORE)  # since the latest drafts, over what was expected
        self._kept: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_plain = 0
        self.ms = 0.0

    def observe_plain(self, ratio: float) -> None:
        """A step without drafts. What nobody has seen for long is forgotten, so that it is tried again."""
        self._plain.append(ratio)
        self._num_plain += 1
        if self._num_plain >= _STEPS_PER_AGE:
            self._num_plain = 0
            if self._kept:
                self._kept.popleft()
                self._tell()

    def observe_drafts(self, ms: float, expected_ms: float) -> None:
        """A step with drafts, of which a part of what was expected counts at most."""
        if self._plain:
            self._kept.append(min(ms / min(self._plain) - expected_ms, _MOST_SHARE * expected_ms))
            self._tell()
        self._plain.clear()
        self._num_plain = 0

    def _tell(self) -> None:
        kept = sorted(self._kept)
        self.ms = kept[int(_QUIET_PART * len(kept))] if len(kept) >= _FEWEST else 0.0
