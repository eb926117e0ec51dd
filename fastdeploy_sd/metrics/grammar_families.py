"""Metrics of guided outputs."""

from __future__ import annotations

from fastdeploy_sd.metrics.family import Single

GRAMMAR_COUNTERS = (
    Single(
        "fastdeploy_sd:grammars_compiled",
        "Grammars of guided outputs that were compiled.",
        lambda s: s.grammars.num_compiled,
    ),
    Single(
        "fastdeploy_sd:grammars_failed",
        "Grammars that could not be compiled; their requests ended with an error.",
        lambda s: s.grammars.num_failed,
    ),
    Single(
        "fastdeploy_sd:grammars_reused",
        "Requests whose grammar was there, or being compiled, when they came.",
        lambda s: s.grammars.num_reused,
    ),
    Single(
        "fastdeploy_sd:grammar_compile_seconds",
        "Seconds spent compiling grammars, while steps run.",
        lambda s: s.grammars.compile_s,
    ),
    Single(
        "fastdeploy_sd:grammar_masks",
        "Masks of guided outputs that steps computed: one per token or draft.",
        lambda s: s.grammars.num_masks,
    ),
    Single(
        "fastdeploy_sd:grammar_mask_seconds",
        "Processor seconds that steps spent on these masks, and on following outputs.",
        lambda s: s.grammars.mask_s,
    ),
    Single(
        "fastdeploy_sd:grammar_masks_off_step",
        "Masks that took too long for a step, and were computed while other requests ran.",
        lambda s: s.grammars.num_late_masks,
    ),
    Single(
        "fastdeploy_sd:grammar_mask_seconds_off_step",
        "Processor seconds spent on these.",
        lambda s: s.grammars.late_mask_s,
    ),
    Single(
        "fastdeploy_sd:grammars_over_budget",
        "Requests that ended with an error, as following their grammar or schema took too long in all.",
        lambda s: s.grammars.num_over_budget,
    ),
)
GRAMMAR_GAUGES = (
    Single(
        "fastdeploy_sd:num_requests_waiting_for_grammar",
        "Requests in the queue whose grammar is being compiled; no other request waits for them.",
        lambda s: s.num_waiting_for_grammar,
    ),
    Single("fastdeploy_sd:num_grammars", "Compiled grammars that are kept.", lambda s: s.grammars.num_kept),
)
