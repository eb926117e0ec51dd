"""The options of scheduling: what a step holds, and how many requests wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastdeploy_sd.config.option import Spec, option, verify_fields


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How requests share steps, and how many may wait."""

    max_num_seqs: int = option(32, Spec("Requests in one step.", minimum=1))
    max_num_batched_tokens: int = option(
        2048, Spec("Tokens in one step: decoding requests first, the rest is prompt chunks.", minimum=1)
    )
    enable_chunked_prefill: bool = option(
        True, Spec("Let a prompt be computed over several steps; without it a prompt must fit into one.")
    )
    long_prefill_token_threshold: int = option(
        0,
        Spec("Most tokens of one prompt in a step; 0: as many as `max_num_batched_tokens` allows.", minimum=0),
    )
    max_step_ms: float = option(
        150.0,
        Spec(
            "While requests decode, a step takes only as many prompt tokens as fit into this time or, where longer,"
            " into the time of three steps without prompts. A prompt alone is not limited. 0: no limit.",
            minimum=0,
        ),
    )
    policy: Literal["fair", "fcfs", "priority"] = option(
        "fair",
        Spec(
            "Order of waiting requests. fair: the client with the fewest running requests first, and half of the"
            " prompt tokens of a step to the shortest prompts. fcfs: arrival. priority: lower first, then arrival.",
            name="scheduling_policy",
        ),
    )
    async_scheduling: bool = option(
        True,
        Spec(
            "On a GPU, prepare steps and hand out outputs while it computes; changes no output. Off: one after the"
            " other, as on a CPU."
        ),
    )
    max_num_queued_requests: int = option(
        512, Spec("Requests that may wait; more are answered with 429 and Retry-After.", minimum=1)
    )
    max_num_queued_tokens: int = option(
        1 << 20, Spec("Prompt tokens that may wait, in all; more are answered with 429.", minimum=1)
    )

    def __post_init__(self) -> None:
        verify_fields(self, "scheduler")

    def rows_of_request(self, num_requests: int) -> int:
        """Tokens that each of `num_requests`, 1 .. max_num_seqs, may run in a step: its newest and its drafts.

        The tokens of a step are shared by the requests that are there. Each has what it would have with every seat
        taken; few of them share half of the step, as the other half is for prompts. All together they always fit.
        """
        shared = self.max_num_batched_tokens // 2 // num_requests
        return max(self.max_num_batched_tokens // self.max_num_seqs, shared, 1)
