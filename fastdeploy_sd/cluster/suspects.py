"""Suspects: tells a request that ends the engines it runs at from requests that were merely there. Knows no engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

# A request that has yielded so many tokens at an engine has not ended it.
CLEARED_BY_TOKENS = 16
# One more loss without progress than happens by chance: from here on it is begun alone.
_ALONE_FROM = 2
_TURN_S = 10.0


@dataclass(eq=False, slots=True)
class Losses:
    """The losses in a row that a request may have caused, and where it is.

    Attributes:
        count: of these losses.
        num_tokens: that it has yielded since it was placed.
        target: where it is; None = nowhere, or it is cleared there.
        has_turn: it is the suspect that is being begun.
        begins_by: on the event loop's clock; then it begins although it is not alone.
        timer: ends its turn.
    """

    count: int = 0
    num_tokens: int = 0
    target: Hashable | None = None
    has_turn: bool = False
    begins_by: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Suspects:
    """Counts each request's losses that it may have caused, and has those that caused several begun alone.

    A loss counts for requests that had not yielded CLEARED_BY_TOKENS at the target. One with several in a row is a
    suspect. Suspects have turns. Once one has found a target no other request is begun anywhere, until it is cleared or
    has run for seconds. It begins where all others are cleared. So one that ends every engine is soon the only one
    whose losses count.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._is_closed = False  # the suspect whose turn it is has found a target
        self._uncleared: defaultdict[Hashable, set[Losses]] = defaultdict(set)

    async def wait_turn(self, losses: Losses) -> None:
        """Before a request is placed: a suspect waits for its turn."""
        if losses.count >= _ALONE_FROM and not losses.has_turn:
            await self._turn.acquire()
            losses.has_turn, losses.begins_by = True, asyncio.get_running_loop().time() + _TURN_S

    def may_begin(self, losses: Losses, target: Hashable) -> bool:
        """Whether a request may begin at a target now; else it is to be placed again later."""
        if not losses.has_turn:
            return not self._is_closed
        self._is_closed = True
        return target not in self._uncleared or asyncio.get_running_loop().time() >= losses.begins_by

    def begin(self, losses: Losses, target: Hashable) -> None:
        """A request begins at a target."""
        losses.target, losses.num_tokens = target, 0
        self._uncleared[target].add(losses)
        if losses.has_turn:
            losses.timer = asyncio.get_running_loop().call_later(_TURN_S, self._end_turn, losses)

    def note_tokens(self, losses: Losses, count: int) -> None:
        """A request has yielded tokens."""
        losses.num_tokens += count
        if losses.target is not None and losses.num_tokens >= CLEARED_BY_TOKENS:
            losses.count = 0
            self.end(losses)

    def note_loss(self, losses: Losses) -> None:
        """A request has lost its target."""
        losses.count += losses.target is not None
        self.leave(losses)

    def leave(self, losses: Losses) -> None:
        """A request is where it was no more."""
        if losses.has_turn:
            self._is_closed = False
        if losses.timer is not None:
            losses.timer.cancel()
        if losses.target is not None:
            self._uncleared[losses.target].remove(losses)
            if not self._uncleared[losses.target]:
                del self._uncleared[losses.target]
        losses.target = None

    def end(self, losses: Losses) -> None:
        """A request has ended, or is cleared."""
        self.leave(losses)
        self._end_turn(losses)

    def _end_turn(self, losses: Losses) -> None:
        if losses.has_turn:
            losses.has_turn = self._is_closed = False
            self._turn.release()
