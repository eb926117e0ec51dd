"""Grammars of requests, compiled while steps run. Owns the interface; knows no library.

A request with a grammar waits, in front of the queue of those that may be admitted, until its grammar is ready:

    submit -> prepare -> ready at once                    into the queue
                      -> ... ready                        into the queue, at the place of its arrival
                         ... failed                       ends with an error
                         ... aborted
    end    -> release

No other request waits for it: it has no seat, no blocks and no place in the queue yet.

While it runs, a mask may take too long for a step. Then the step says that the request is held; others go on without
it until its mask has been computed:

    step -> held ... masked      in the next step again, with its blocks and all that it had
                 ... aborted, or preempted
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastdeploy_sd.types import RequestId
from fastdeploy_sd.types.stats import GrammarStats


class Grammars(Protocol):
    """Compiles grammars. Called by the thread that steps the engine; `fd`: readable as long as `take_prepared` or
    `take_masked` has something to return.
    """

    fd: int

    def prepare(self, grammar: str) -> None:
        """Have a grammar for one request more, compiled while steps run if no other has it; `release` ends that."""

    def release(self, grammar: str) -> None:
        """End what one `prepare` began."""

    def is_ready(self, grammar: str) -> bool:
        """Whether a prepared grammar can be used by steps."""

    def error_of(self, grammar: str) -> str:
        """Return why a prepared grammar cannot be compiled; "" = it can, or it is not known yet."""

    def take_prepared(self) -> Sequence[str]:
        """Return, once each, the grammars that have become ready or failed."""

    def take_masked(self) -> Sequence[RequestId]:
        """Return, once each, the requests whose mask was computed off the steps; see `StepResult.held`."""

    def stats(self) -> GrammarStats:
        """Return what has been compiled."""
