"""What has been compiled for guided outputs, as numbers that leave the process. Knows no grammar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """What has been compiled since the start.

    Attributes:
        num_compiled, num_failed: compilations, by how they ended.
        compile_s: seconds that they took together.
        num_reused: requests whose grammar was there, or under way, when they came.
        num_kept: compiled grammars now.
        num_masks, mask_s: masks that steps computed, one per token or draft; processor seconds for them, and for
            following output.
        num_late_masks, late_mask_s: the same off the steps.
        num_over_budget: requests that ended as their grammar took too long.
    """

    num_compiled: int = 0
    num_failed: int = 0
    compile_s: float = 0.0
    num_reused: int = 0
    num_kept: int = 0
    num_masks: int = 0
    mask_s: float = 0.0
    num_late_masks: int = 0
    late_mask_s: float = 0.0
    num_over_budget: int = 0
