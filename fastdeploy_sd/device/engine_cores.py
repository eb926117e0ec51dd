"""Division of a machine's processors among engines: whole cores, of one memory node each where parts are equal so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fastdeploy_sd.device.processors import Core, describe_numbers, read_cores, share_quota


@dataclass(frozen=True, slots=True)
class EngineCores:
    """The cores of one of several engines.

    Attributes:
        is_shared: other engines have the same cores, as there are fewer cores than engines.
    """

    cores: tuple[Core, ...]
    is_shared: bool = False

    @property
    def processors(self) -> set[int]:
        """The processors of all of them."""
        return {number for core in self.cores for number in core.processors}

    @property
    def nodes(self) -> list[int]:
        """The memory nodes, as far as they are known."""
        return sorted({core.node for core in self.cores if core.node is not None})

    def describe(self) -> str:
        """Return them in words, for logs and `explain-config`."""
        count = len(self.cores)
        text = f"processors {describe_numbers(self.processors)}, {count} core{'s' * (count > 1)}"
        if self.nodes:
            text += f" of memory node{'s' * (len(self.nodes) > 1)} {describe_numbers(self.nodes)}"
        return text + ", shared with other engines: there are fewer cores than engines" * self.is_shared


def divided(cores: Sequence[Core], count: int) -> list[EngineCores]:
    """Return the cores of each of `count` engines: as many for each as for another, or one more.

    Cores of a memory node follow one another, so an engine's lie on one node wherever equal parts allow that. With
    fewer cores than engines, several engines have the same core.

    Args:
        cores: at least one.
    """
    ordered = sorted(cores, key=lambda core: (-1 if core.node is None else core.node, core.processors))
    if len(ordered) < count:
        return [EngineCores((ordered[number % len(ordered)],), is_shared=True) for number in range(count)]
    ends = [len(ordered) * number // count for number in range(count + 1)]
    return [EngineCores(tuple(ordered[begin:end])) for begin, end in pairwise(ends)]


def take_share(number: int, count: int) -> EngineCores:
    """Give this process, and what it starts, the processors of engine `number` of `count`, and its part of a quota.

    It must come before anything asks for `own_processors`. Raises OSError: the system does not allow it.
    """
    share_quota(count)
    own = divided(read_cores(Path("/"), os.sched_getaffinity(0)), count)[number]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own.processors)
    return own
