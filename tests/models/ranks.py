"""The ranks of a group as threads of one process, each with its own end of one segment of shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from fastdeploy_sd.device.communicator import Communicator, shared_segment
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """One rank, as layers see it, and what begins an attempt at a pass."""

    group: TpGroup
    begin: Callable[[int], None]


# Far longer than any pass here takes on a busy machine; a rank that fails ends the others at once.
TIMEOUT_S = 120.0


@contextlib.contextmanager
def rank_groups(size: int) -> Iterator[list[Rank]]:
    """Give every rank of a group; what the body makes of them must not run afterwards."""
    if size == 1:
        yield [Rank(ALONE, lambda _: None)]
        return
    with contextlib.ExitStack() as stack:
        fd = shared_segment()
        stack.callback(os.close, fd)
        ranks = []
        for rank in range(size):
            communicator = Communicator.shared(fd, rank, size, TIMEOUT_S)
            stack.callback(communicator.close)
            ranks.append(Rank(TpGroup(communicator), communicator.begin))
        yield ranks


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run every rank's work at the same time and return what each returned; raises what one raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result() for done in [pool.submit(work) for work in works]]
