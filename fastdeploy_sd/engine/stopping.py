"""When a request ends, as a pure function of its new tokens. Knows token ids; stop strings are the frontend's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.types import FinishReason, Request


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a request.

    Attributes:
        eos_token_ids: empty when the request ignores EOS.
        stop_token_ids: the request's own, not those that are EOS already.
        min_tokens: outputs before this many are never the last one, except by max_tokens.
        max_tokens: the output with this number is the last one; 0 = there is none.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.eos_token_ids | self.stop_token_ids

    @staticmethod
    def of(request: Request) -> StopRule:
        sampling = request.sampling
        eos = frozenset[int]() if sampling.ignore_eos else frozenset(request.eos_token_ids)
        max_tokens = 0 if sampling.max_tokens == 0 else request.max_tokens
        return StopRule(eos, frozenset(sampling.stop_token_ids) - eos, sampling.min_tokens, max_tokens)


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why a request ended: how many new tokens are output, and the stop token, if that matched."""

    num_tokens: int
    reason: FinishReason
    stop_reason: int | None = None


def find_stop(new_token_ids: Sequence[int], num_output_tokens: int, rule: StopRule) -> Stop | None:
    """Find the first of the new tokens that ends the request.

    Rule: output number n (from 1) ends it when n >= min_tokens and it is an EOS or a stop token, or when
    n == max_tokens. At the same token EOS wins over a stop token, and both win over the length. Since the first such
    token counts, the answer does not depend on how many tokens a step brought:

        outputs    1 .. num_output_tokens | new: a  b  EOS  c  d
                                                 '---kept--'  '- cut: accepted drafts past the end
        The stop, or None when the request goes on.
    """
    if rule.max_tokens == 0 and new_token_ids:
        return Stop(0, FinishReason.LENGTH)
    for i, token_id in enumerate(new_token_ids, 1):
        number = num_output_tokens + i
        if number >= rule.min_tokens:
            if token_id in rule.eos_token_ids:
                return Stop(i, FinishReason.STOP)
            if token_id in rule.stop_token_ids:
                return Stop(i, FinishReason.STOP, token_id)
        if number >= rule.max_tokens:
            return Stop(i, FinishReason.LENGTH)
    return None
