"""Requests that go on elsewhere: which losses count against one, and what it is placed with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from fastdeploy_sd.cluster.moving import MovingRequests
from fastdeploy_sd.cluster.suspects import CLEARED_BY_TOKENS, Losses, Suspects
from fastdeploy_sd.errors import ENGINE_FAILED, FdsdError, InternalError, Overloaded, Unavailable
from fastdeploy_sd.types import FinishReason, Request, RequestOutput
from tests.doubles.engines import toy_request

LOST = Unavailable("lost", code="engine_down")
MAX_LOSSES = 4


@dataclass
class Targets:
    """One target, whose runs are scripted.

    Attributes:
        run: (request id, tokens it has) -> tokens to yield and how the run ends; None = with the request.
        placed: of each request, the errors it was placed with.
    """

    run: Callable[[str, int], tuple[int, FdsdError | None]]
    placed: dict[str, list[FdsdError | None]] = field(default_factory=dict)
    moving: MovingRequests[int] = field(init=False)

    def __post_init__(self) -> None:
        self.moving = MovingRequests(self._place, self._run, lambda *_: None, MAX_LOSSES)

    async def _place(self, request: Request, avoided: set[str], error: FdsdError | None) -> int:
        self.placed.setdefault(str(request.request_id), []).append(error)
        await asyncio.sleep(0)
        return 0

    async def _run(self, target: int, request: Request) -> AsyncGenerator[RequestOutput, None]:
        has = len(request.output_token_ids)
        count, error = self.run(str(request.request_id), has)
        for token in range(has, has + count):
            await asyncio.sleep(0)
            yield RequestOutput(request.request_id, (token,))
        if error is not None:
            raise error
        yield RequestOutput(request.request_id, (-1,), finish_reason=FinishReason.LENGTH)

    async def read(self, name: str) -> list[int]:
        """Run a request; return its tokens."""
        request = toy_request(name, [5], max_tokens=1000)
        return [t async for o in self.moving.generate(request) for t in o.token_ids]


async def test_losses_with_progress_between_them_never_end_a_request() -> None:
    targets = Targets(lambda name, has: (CLEARED_BY_TOKENS, LOST if has < 20 * CLEARED_BY_TOKENS else None))
    assert await targets.read("r") == [*range(21 * CLEARED_BY_TOKENS), -1]
    assert len(targets.placed["r"]) == 21


@pytest.mark.parametrize("loss", [LOST, InternalError("the engine failed", code=ENGINE_FAILED)])
async def test_losses_without_progress_end_it_with_an_error_that_moves_nowhere(loss: FdsdError) -> None:
    targets = Targets(lambda name, has: (1, loss))
    with pytest.raises(InternalError, match="4 engines ended") as caught:
        await targets.read("r")
    assert caught.value.code == "ends_engines"
    assert len(targets.placed["r"]) == MAX_LOSSES


async def test_an_error_of_the_request_alone_is_its_own() -> None:
    targets = Targets(lambda name, has: (1, InternalError("a sampler failed")))
    with pytest.raises(InternalError, match="sampler"):
        await targets.read("r")
    assert len(targets.placed["r"]) == 1


async def test_a_request_that_was_accepted_and_lost_is_not_refused_as_a_new_one() -> None:
    full = Overloaded("full")
    ends = iter([LOST, full, full, None])
    targets = Targets(lambda name, has: (0, next(ends)))
    assert await targets.read("r") == [-1]
    assert targets.placed["r"] == [None, LOST, LOST, LOST]


async def test_requests_that_a_bad_one_takes_along_outlive_it() -> None:
    """It comes again and again, as clients repeat what failed; whatever runs at the target is lost with it."""
    inside: set[str] = set()

    class Shared(Targets):
        async def _run(self, target: int, request: Request) -> AsyncGenerator[RequestOutput, None]:
            name, has = str(request.request_id), len(request.output_token_ids)
            inside.add(name)
            for token in range(has, 2 * CLEARED_BY_TOKENS):
                for _ in range(3):
                    await asyncio.sleep(0)
                if name.startswith("bad") or name not in inside:
                    inside.clear()
                    raise Unavailable("lost", code="engine_down")
                yield RequestOutput(request.request_id, (token,))
            inside.discard(name)
            yield RequestOutput(request.request_id, (-1,), finish_reason=FinishReason.LENGTH)

    targets = Shared(lambda name, has: (0, None))
    others = [asyncio.create_task(targets.read(f"r{i}")) for i in range(5)]
    for i in range(3):
        with pytest.raises(InternalError, match="4 engines ended"):
            await targets.read(f"bad{i}")
        assert len(targets.placed[f"bad{i}"]) >= MAX_LOSSES
        others.append(asyncio.create_task(targets.read(f"late{i}")))
    assert await asyncio.gather(*others) == [[*range(2 * CLEARED_BY_TOKENS), -1]] * len(others)


async def test_a_suspect_whose_reader_leaves_lets_the_next_one_run() -> None:
    gate = asyncio.Event()

    class Slow(Targets):
        async def _run(self, target: int, request: Request) -> AsyncGenerator[RequestOutput, None]:
            if len(self.placed[str(request.request_id)]) < 3:  # else it is a suspect
                raise Unavailable("lost", code="engine_down")
            if request.request_id == "a":
                await gate.wait()
            yield RequestOutput(request.request_id, (-1,), finish_reason=FinishReason.LENGTH)

    targets = Slow(lambda name, has: (0, None))
    first, second = asyncio.create_task(targets.read("a")), asyncio.create_task(targets.read("b"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert [len(targets.placed[name]) for name in "ab"] == [3, 2], "it waits for its turn"
    first.cancel()
    assert await second == [-1]


async def test_nothing_is_begun_while_a_suspect_begins() -> None:
    suspects, suspect, other = Suspects(), Losses(count=2), Losses()
    await suspects.wait_turn(suspect)
    assert suspects.may_begin(other, 0), "the suspect has found no target yet"
    suspects.begin(other, 0)
    assert not suspects.may_begin(suspect, 0), "the other one may end the target"
    assert not suspects.may_begin(Losses(), 1)
    suspects.note_tokens(other, CLEARED_BY_TOKENS)
    assert suspects.may_begin(suspect, 0)
    suspects.begin(suspect, 0)
    assert not suspects.may_begin(Losses(), 1)
    suspects.note_tokens(suspect, CLEARED_BY_TOKENS)
    assert suspects.may_begin(Losses(), 0)
    assert suspect.count == 0
