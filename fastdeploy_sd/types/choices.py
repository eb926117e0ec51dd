"""What a method that chooses drafts by itself has made of the steps so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well the drafts of one source were judged.

    Attributes:
        num_scored: drafts that were compared with the text, verified or not, each after those before it were right.
        expected, observed: how many of them should have been right, and were.
        squared_error: the sum of the squared differences between a draft's probability and what became of it.
    """

    num_scored: int = 0
    expected: float = 0.0
    observed: int = 0
    squared_error: float = 0.0


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """Totals since the start, but for `gain` and `reason`.

    Attributes:
        gain: tokens per second over what plain decoding would have given in the latest steps; 0 = not known yet.
        reason: why the latest step got no drafts, a key of `num_steps`; "" = it got some.
        num_steps: what was decided -> steps: `drafts`; or why there are none: `low_gain` (none was worth its time),
            `load` (no draft could be, with so many rows in the step), `request` (no request allows any), `no_drafter`
            (no source offered any), `comparison` (a plain step now and then, to compare with).
        predicted_s, measured_s: time of the steps for which it was predicted.
        calibrations: DraftSource name in lower case -> how well its drafts were judged.
    """

    gain: float = 0.0
    reason: str = ""
    num_steps: dict[str, int] = field(default_factory=dict)
    predicted_s: float = 0.0
    measured_s: float = 0.0
    calibrations: dict[str, Calibration] = field(default_factory=dict)
