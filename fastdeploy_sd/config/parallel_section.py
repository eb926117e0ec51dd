"""The options of several processes that compute one model."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.config.option import Spec, option, verify_fields


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the model is shared out among processes."""

    tensor_parallel_size: int = option(
        1,
        Spec(
            "Processes (ranks) that compute the model together: each has its share of every layer's weights, of the KV"
            " cache and of the cores. The tokens are the same for every size.",
            choices=(1, 2, 4),
        ),
    )
    rank_timeout_s: float = option(
        10.0,
        Spec(
            "Seconds in which no rank computes although a step waits for one; then that one hangs, all requests end"
            " with an error, and the server ends with status 1.",
            name="timeout_rank",
            minimum=0.1,
        ),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "parallel")
