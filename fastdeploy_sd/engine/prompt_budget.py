"""How many prompt tokens a step holds, and how they are divided among requests. Knows no blocks and no executor."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_sd.config import SchedulerConfig
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.types import SchedulerOutput, StepResult

_PLAIN_STEPS = 3.0  # a step may always take as long as so many without prompts
_TARGET = 0.85  # of the limit, as step times vary
_ROUND_TO = 8  # rows of a kernel's block: a chunk of fewer rows takes as long
_MOST_SLOWDOWN = 2.0  # that one step may report: it may have been disturbed
_FIRST_CHUNK = 64  # before any time is known
_WEIGHT = 0.5  # of the newest time of a prompt token
_MANY_TOKENS = 1 << 30
_PLAIN_WEIGHT = 0.2  # of the newest time of a step without prompts


class StepTime:
    """Learns what tokens cost from the steps that had prompts, and bounds those by time.

    The time of a step is taken as that of a step without prompts, plus `per_token` for each token that it has more.
    All three are running means, and a step of half the tokens counts half. The error is small where it matters: chunks
    have about the size that is asked for next. As decoding tokens count like prompt tokens, the bound holds too when
    many requests begin at once after steps of a few.

    Args:
        max_step_ms: most milliseconds of a step in which requests decode, or three steps without prompts if these take
            longer; 0 = no bound.
    """

    def __init__(self, max_step_ms: float) -> None:
        self._max_step_ms = max_step_ms
        self._plain_ms = 0.0
        self._num_plain = 0.0  # tokens of such a step
        self._per_token_ms = 0.0

    def max_prompt_tokens(self, most: int, num_decoding: int) -> int:
        """Return how many prompt tokens a step may hold with so many tokens of requests that decode, 1 .. `most`."""
        if not self._max_step_ms:
            return most
        if not self._per_token_ms:
            return min(_FIRST_CHUNK, most)
        plain_ms = self._plain_ms + (num_decoding - self._num_plain) * self._per_token_ms
        limit_ms = _TARGET * max(self._max_step_ms, _PLAIN_STEPS * plain_ms)
        found = int((limit_ms - plain_ms) / self._per_token_ms)
        return min(max(found - found % _ROUND_TO, _ROUND_TO), most)

    def observe(self, plan: SchedulerOutput, result: StepResult) -> None:
        if not self._max_step_ms:
            return
        ms = sum(result.timings_ms.values()) - result.timings_ms.get("idle", 0.0)
        num_tokens = int(plan.num_new_tokens.sum())
        if num_tokens - len(plan.draft.token_ids) == len(plan.request_ids):  # no row has more
            weight = _PLAIN_WEIGHT if self._plain_ms else 1.0
            self._plain_ms += weight * (ms - self._plain_ms)
            self._num_plain += weight * (num_tokens - self._num_plain)
            return
        num_more = num_tokens - self._num_plain
        if num_more < 1:
            return
        per_token_ms = max(ms - self._plain_ms, 0.1 * ms) / num_more
        weight = 1.0
        if self._per_token_ms:  # a few tokens say little: a step takes as long with one as with several
            weight = _WEIGHT * min(num_more / self.max_prompt_tokens(_MANY_TOKENS, 0), 1.0)
            per_token_ms = min(per_token_ms, _MOST_SLOWDOWN * self._per_token_ms)
        self._per_token_ms += weight * (per_token_ms - self._per_token_ms)


class PromptBudget:
    """Bounds the prompt tokens of a step, and divides them among prompts that together want more.

    Under the 'fair' policy half of them go to the shortest prompts, the other half in the order of requests, so that
    neither short nor long prompts wait without end: a short one has half of the machine at once, and a long one takes
    at most twice as long as without shorter ones. Prompts of one length run in their order.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self.time = StepTime(limits.max_step_ms)
        self._max_tokens = limits.max_num_batched_tokens
        self.max_chunk = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        self._is_chunked = limits.enable_chunked_prefill
        self._is_fair = limits.policy == "fair" and limits.enable_chunked_prefill

    def max_tokens(self, num_decoding: int) -> int:
        """Prompt tokens a step may hold with so many tokens of requests that decode. Without chunked prefill a prompt
        runs whole, and no time bounds it.
        """
        if num_decoding and self._is_chunked:
            return self.time.max_prompt_tokens(self._max_tokens, num_decoding)
        return self._max_tokens

    def chunk(self, num_tokens: int, room: int) -> int:
        """Tokens that a prompt with so many left runs in a step with that much room."""
        return min(num_tokens, room, self.max_chunk)

    def may_start(self, num_tokens: int, room: int) -> bool:
        """Whether the room is enough for a prompt of so many tokens to run, or for a chunk of it."""
        is_chunked = self._is_chunked or num_tokens > self._max_tokens
        return num_tokens <= room or (is_chunked and room > 0)

    def shorter(self, waiting: Iterable[RequestState], running: list[int], room: int) -> tuple[list[RequestState], int]:
        """Return the waiting requests, given shortest first, that go before the running prompts, and their tokens.
        They get half of the room; `running` says how many tokens each running prompt has left.
        """
        found: list[RequestState] = []
        if not self._is_fair or sum(self.chunk(count, room) for count in running) < room:
            return found, 0
        shortest, left = min(running), room // 2
        for state in waiting:
            if left <= 0 or state.num_tokens >= shortest:
                break
            found.append(state)
            left -= self.chunk(state.num_tokens, left)
        return found, room // 2 - left

    def divide(self, wanted: list[int], room: int, num_reserved: int) -> list[int]:
        """Divide the room among prompts that want so many tokens; others get `num_reserved` of the short ones' half."""
        shares, order = [0] * len(wanted), range(len(wanted))
        chunks = [min(count, self.max_chunk) for count in wanted]
        by_length = room // 2 - num_reserved if self._is_fair else 0
        left = _give(shares, chunks, sorted(order, key=wanted.__getitem__), by_length)
        _give(shares, chunks, order, room - num_reserved - by_length + left)
        return shares


def _give(shares: list[int], wanted: list[int], order: Iterable[int], room: int) -> int:
    for i in order:
        share = min(wanted[i] - shares[i], room)
        shares[i] += share
        room -= share
    return room
