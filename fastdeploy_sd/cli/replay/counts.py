"""The numbers of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_sd.types import I64

_NS_PER_US = 1e3


@dataclass(slots=True, eq=False)
class ReplayCounts:
    """What a method did on a recording; grows while it is replayed.

    A response's first token comes with its prompt, before anything can be drafted; every later step is a verify step,
    also one without drafts, as plain decoding would run it too.

    Attributes:
        num_drafting_steps: those of them that verified at least one draft.
        drafted, reached, accepted: i64[k]; entry i counts drafts at position i that were verified / whose predecessors
            were all accepted / that were accepted.
        num_calls, num_rows: propose calls, and requests in them.
        propose_ns, begin_ns: time in propose, and in begin and forget.
        verify_time: of all verify steps, in the unit of the cost that was given.
        peak_memory_bytes: of the method's own memory; None where the method does not tell.
    """

    drafted: I64
    reached: I64
    accepted: I64
    num_responses: int = 0
    num_output_tokens: int = 0
    num_verify_steps: int = 0
    num_drafting_steps: int = 0
    num_calls: int = 0
    num_rows: int = 0
    propose_ns: int = 0
    begin_ns: int = 0
    verify_time: float = 0.0
    peak_memory_bytes: int | None = None

    @staticmethod
    def empty(num_speculative_tokens: int) -> ReplayCounts:
        """Nothing counted, for drafts of at most that length."""
        drafted, reached, accepted = np.zeros((3, num_speculative_tokens), np.int64)
        return ReplayCounts(drafted, reached, accepted)

    def record(self, *, is_first: bool, parents: Sequence[int], path: Sequence[int], num_emitted: int) -> None:
        """Count one step of one response.

        Args:
            is_first: the step that gave the first token.
            parents: of the drafts; see DraftTokens.
            path: the accepted drafts.
            num_emitted: output tokens, cut at the response's end.
        """
        self.num_output_tokens += num_emitted
        self.num_verify_steps += not is_first
        self.num_drafting_steps += len(parents) > 0
        depths, accepted = [0], {-1, *path}
        for parent in parents:
            depth = depths[parent + 1]
            depths.append(depth + 1)
            self.drafted[depth] += 1
            self.reached[depth] += parent in accepted
        self.accepted[: len(path)] += 1

    @property
    def num_drafted(self) -> int:
        """Drafts verified."""
        return int(self.drafted.sum())

    @property
    def num_accepted(self) -> int:
        """Drafts accepted."""
        return int(self.accepted.sum())

    @property
    def tokens_per_verify_step(self) -> float:
        """Output tokens after the first ones over the steps that gave them; 1.0 is plain decoding."""
        num_tokens = self.num_output_tokens - self.num_responses
        return num_tokens / self.num_verify_steps if self.num_verify_steps else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Accepted over reached at each position; 0.0 where none was reached."""
        return [float(rate) for rate in self.accepted / np.maximum(self.reached, 1)]

    @property
    def us_per_call(self) -> float:
        """Microseconds of one propose call."""
        return self.propose_ns / _NS_PER_US / max(self.num_calls, 1)

    @property
    def us_per_request(self) -> float:
        """Microseconds of propose per request in it."""
        return self.propose_ns / _NS_PER_US / max(self.num_rows, 1)

    def to_json(self) -> dict[str, Any]:
        """Return all of it under plain names."""
        return {
            "tokens_per_verify_step": self.tokens_per_verify_step,
            "num_responses": self.num_responses,
            "num_output_tokens": self.num_output_tokens,
            "num_verify_steps": self.num_verify_steps,
            "num_drafting_steps": self.num_drafting_steps,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_wasted": self.num_drafted - self.num_accepted,
            "acceptance_per_position": self.acceptance_per_position,
            "drafted_per_position": self.drafted.tolist(),
            "reached_per_position": self.reached.tolist(),
            "accepted_per_position": self.accepted.tolist(),
            "us_per_call": self.us_per_call,
            "us_per_request": self.us_per_request,
            "begin_us_per_response": self.begin_ns / _NS_PER_US / max(self.num_responses, 1),
            "peak_memory_bytes": self.peak_memory_bytes,
        }
