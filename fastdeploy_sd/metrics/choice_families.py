"""The metrics of a drafting method that chooses by itself; without one they have no samples."""

from __future__ import annotations

from fastdeploy_sd.metrics.family import Labelled, Single, ratio
from fastdeploy_sd.types import Calibration
from fastdeploy_sd.types.stats import EngineStats


def _calibrations(stats: EngineStats) -> dict[str, Calibration]:
    return {} if stats.choice is None else stats.choice.calibrations


CHOICE_GAUGES = (
    Single(
        "fastdeploy_sd:spec_decode_drafter_misread",
        "1 if next to no draft of the drafter is right, as if its files were read otherwise than it was trained "
        "(`fastdeploy-sd drafter check`), else 0.",
        lambda s: float(bool(s.misread_drafter)),
    ),
    Single(
        "fastdeploy_sd:spec_decode_gain",
        "Tokens per second over what plain decoding would have given in the latest steps, as estimated by method auto.",
        lambda s: None if s.choice is None else s.choice.gain or None,
    ),
    Single(
        "fastdeploy_sd:spec_decode_step_time_ratio",
        "Measured time of steps over the time that method auto predicted for them.",
        lambda s: None if s.choice is None else ratio(s.choice.measured_s, s.choice.predicted_s),
    ),
)

CHOICE_LABELLED_COUNTERS = (
    Labelled(
        "fastdeploy_sd:spec_decode_choices",
        "Steps by what method auto decided: drafts, or none as none was worth its time (low_gain), none could be with "
        "so many rows in the step (load), no request allowed any (request), none was offered (no_drafter), or a plain "
        "step was there to compare with (comparison).",
        "choice",
        lambda s: {} if s.choice is None else s.choice.num_steps,
    ),
    Labelled(
        "fastdeploy_sd:spec_decode_scored_drafts",
        "Drafts that method auto compared with the text, verified or not, by source; each after right ones only.",
        "source",
        lambda s: {source: j.num_scored for source, j in _calibrations(s).items()},
    ),
    Labelled(
        "fastdeploy_sd:spec_decode_expected_right_drafts",
        "Of these, how many method auto expected to be right, by source.",
        "source",
        lambda s: {source: j.expected for source, j in _calibrations(s).items()},
    ),
    Labelled(
        "fastdeploy_sd:spec_decode_right_drafts",
        "Of these, how many were right, by source.",
        "source",
        lambda s: {source: j.observed for source, j in _calibrations(s).items()},
    ),
)

CHOICE_LABELLED_GAUGES = (
    Labelled(
        "fastdeploy_sd:spec_decode_brier_score",
        "Mean squared error of method auto's probabilities that a draft is right, by source: 0 is perfect, 0.25 knows "
        "nothing.",
        "source",
        lambda s: {source: j.squared_error / j.num_scored for source, j in _calibrations(s).items() if j.num_scored},
    ),
)
