"""Synthetic requests, to run steps of any shape on an idle executor, before it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import (
    EMPTY_I32,
    LIVE_STATE,
    NO_STATE,
    DraftTokens,
    ModelInfo,
    NewRequest,
    Request,
    SchedulerOutput,
    Speculation,
    StatePlan,
    StepResult,
    offsets,
)

Execute = Callable[[SchedulerOutput], StepResult]

# The prompt repeats itself, so that there is something to draft from.
_CYCLE_LEN = 16
_DRAFT_TOKEN_ID = 0
# What methods learn from these outputs is not shared with requests of clients.
_SALT = "measurement"
_LEAST_SPARE = 48


class FailedStepError(InternalError):
    """The model cannot run a synthetic request; those of clients may still succeed."""


class SyntheticRequests:
    """Requests with the same prompt, of any tokens, whose contexts are the same blocks, each in its own order.

    Shared prefixes are read once for all requests (see `find_shared_prefixes`), but clients' requests seldom share one.
    Blocks in another order cost as much as other contexts, without more memory or another prompt. After its context,
    each request has its own blocks.

    `contexts`: the shorter and the longer wanted number of tokens before a request's newest one.

    Attributes:
        max_count: of requests; 0 = no room for one.
        short_context, long_context: as wanted, or as many as fit, in whole blocks.
        num_filled: tokens of the prompt whose KV was computed.
    """

    def __init__(self, execute: Execute, info: ModelInfo, max_requests: int, contexts: tuple[int, int]) -> None:
        self._execute, self._info = execute, info
        size, speculation = info.block_size, info.speculation
        # What a request may grow by before it begins anew.
        self._spare = max(_LEAST_SPARE, 4 * (speculation.max_draft_tokens + 1)) + speculation.num_lookahead_slots
        self._own_blocks = -(-(self._spare + 1) // size)
        room = max(0, self.in_blocks(min(info.max_request_tokens, info.num_blocks * size) - self._own_blocks * size))
        short, long = (min(-(-wanted // size) * size, room) for wanted in contexts)
        # More requests say more than a longer context.
        self.short_context, self.long_context = (
            short,
            max(short, min(long, self.in_blocks(info.num_blocks * size // 2))),
        )
        most = (info.num_blocks - self.long_context // size) // self._own_blocks
        self.max_count = min(max_requests, most) if room > 0 else 0
        self.num_filled = 0
        prompt = np.random.default_rng(0).integers(0, info.vocab_size, _CYCLE_LEN, np.int32)
        self._prompt = np.resize(prompt, self.long_context + 1)
        self._ids: tuple[str, ...] = ()
        self._gone: tuple[str, ...] = ()
        self._num_tokens: list[int] = []
        self._context, self._method, self._num_steps = 0, "", 0
        self._has_state = set[str]()  # requests whose recurrent states go on

    def in_blocks(self, num_tokens: int) -> int:
        """Return `num_tokens` rounded down to whole blocks."""
        return num_tokens // self._info.block_size * self._info.block_size

    def begin(self, count: int, context: int, method: str = "") -> None:
        """Replace all requests by `count` with this much context, and run a step of each, if that is filled.

        `method`: they draft by; "" = they do not draft.
        """
        self._gone += self._ids
        self._ids = tuple(f"measurement-{self._num_steps}-{i}" for i in range(count))
        self._num_tokens = [context + 1] * count
        self._context, self._method = context, method
        if context <= self.num_filled:
            self._step([1] * count, [0] * count, [self._new(i) for i in range(count)])

    def fill(self, num_rows: int) -> Mapping[str, float]:
        """Compute the next rows of the prompt in the only request, at most to its end; returns the phases' times."""
        begin = self.num_filled
        num_rows = min(num_rows, self._context - begin)
        new = [self._new(0)] if begin == 0 else []
        self.num_filled += num_rows
        return self._plan([begin], [num_rows], [0], [0], new).timings_ms

    def run_prompt(self, num_rows: int) -> Mapping[str, float]:
        """Compute the first rows of the prompt again, in the first request."""
        self._has_state.discard(self._ids[0])
        timings_ms = self._plan([0], [num_rows], [0], [0]).timings_ms
        self._has_state.discard(self._ids[0])
        return timings_ms

    def run(self, count: int, num_drafts: int, num_wanted: int = 0) -> Mapping[str, float]:
        """Run a step of the first `count` requests, and return the phases' times.

        `num_drafts`: verified, of each. num_wanted: how many the method is asked for, for each.
        """
        num_ahead = num_drafts + num_wanted + self._info.speculation.num_lookahead_slots + 2
        if max(self._num_tokens[:count]) + num_ahead > self._context + self._spare:
            self.begin(len(self._ids), self._context, self._method)
        return self._step([1 + num_drafts] * count, [num_drafts] * count, [], num_wanted)

    def end(self) -> None:
        """Remove all of them from the executor."""
        self._gone, self._ids = self._gone + self._ids, ()
        self._num_tokens = []
        self._plan([], [], [], [])

    def _step(
        self, num_new: list[int], num_drafts: list[int], new: Sequence[NewRequest], num_wanted: int = 0
    ) -> Mapping[str, float]:
        """Choose the next token of the first requests."""
        computed = [self._num_tokens[i] - 1 for i in range(len(num_new))]
        result = self._plan(computed, num_new, num_drafts, [num_wanted] * len(num_new), new)
        for i, count in enumerate(np.diff(result.verified.cu_num_output).tolist()):
            self._num_tokens[i] += count
        return result.timings_ms

    def _plan(
        self,
        computed: list[int],
        num_new: list[int],
        num_drafts: list[int],
        num_wanted: list[int],
        new: Sequence[NewRequest] = (),
    ) -> StepResult:
        self._num_steps += 1
        plan = SchedulerOutput(
            step_id=self._num_steps,
            request_ids=self._ids[: len(num_new)],
            new=tuple(new),
            deltas=(),
            num_computed_tokens=np.array(computed, np.int32),
            num_new_tokens=np.array(num_new, np.int32),
            draft=DraftTokens(np.full(sum(num_drafts), _DRAFT_TOKEN_ID, np.int32), offsets(num_drafts)),
            max_draft_len=np.array(num_wanted, np.int32),
            finished_ids=self._gone,
            states=self._states(self._ids[: len(num_new)]),
        )
        self._gone = ()
        result = self._execute(plan)
        if result.failed:
            [(_, reason), *_] = result.failed.values()
            raise FailedStepError(f"measurement: expected steps that succeed, got: {reason}")
        return result

    def _states(self, ids: Sequence[str]) -> StatePlan | None:
        """Return where states begin. That of a context which another request has computed costs what none does."""
        if self._info.num_state_snapshots is None:
            return None
        initial = np.array([LIVE_STATE if name in self._has_state else NO_STATE for name in ids], np.int32)
        self._has_state.update(ids)
        return StatePlan(initial, offsets([0] * len(ids)), EMPTY_I32, EMPTY_I32)

    def _new(self, i: int) -> NewRequest:
        num_tokens, size = self._context + 1, self._info.block_size
        max_tokens = self._info.max_request_tokens - num_tokens
        context = _order(self._context // size, i)
        own = self.long_context // size + i * self._own_blocks
        speculation = Speculation(method=self._method) if self._method else Speculation(enabled=False)
        request = Request(
            request_id=self._ids[i],
            prompt_token_ids=self._prompt[:num_tokens],
            sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
            max_tokens=max_tokens,
            seed=0,
            speculation=speculation,
            cache_salt=_SALT,
        )
        blocks, num_groups = (*context, *range(own, own + self._own_blocks)), len(self._info.groups)
        counts = (len(blocks),) * num_groups if num_groups > 1 else ()
        # Layers of several groups overwrite one another's KV, which costs what separate blocks would.
        return NewRequest(request, request.prompt_token_ids, num_tokens, blocks * num_groups, num_blocks=counts)


def _order(count: int, i: int) -> list[int]:
    """Return a distinct order of so many blocks for each i below 2 * count; 0 gives the order of computation."""
    if count == 0:
        return []
    order = [*range(i % count, count), *range(i % count)]
    return order if i // count % 2 == 0 else order[::-1]
