"""How the prompt tokens of a step are divided among requests. Knows no blocks and no executor."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_sd.config import SchedulerConfig
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.step_time import StepTime


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

    def max_tokens(self, *, is_decoding: bool) -> int:
        """Prompt tokens a step may hold. Without chunked prefill a prompt runs whole, and no time bounds it."""
        if is_decoding and self._is_chunked:
            return self.time.max_prompt_tokens(self._max_tokens)
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
    """Give what is wanted in this order while there is room; returns what is left."""
    for i in order:
        share = min(wanted[i] - shares[i], room)
        shares[i] += share
        room -= share
    return room
