"""What a worker knows of its rank group. Values and callables; how ranks reach each other is in distributed/."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.worker.ranks.coordinator import Collectives, OtherRanks

# What ranks that have nothing to say measure.
_MOST = 1 << 62


class NoCollectives:
    """Collectives of a process that exchanges nothing."""

    def begin(self, attempt: int) -> None:
        """There is no other rank to be in step with."""

    def fail(self) -> None:
        """There is no other rank."""


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """A rank's place among `size`; by default the only one.

    Attributes:
        num_threads: of this rank's kernels, its share of the host's cores, unless the configuration says how many.
        communicator: what the ranks exchange inside a pass; None = nothing.
        others: rank 0's hold on the other ranks; None on these, and where there are none.
        agree: what other ranks than 0 call when their draft layers have run; see LoadedDraftModel.agree.
        smallest: gives every rank the smallest of what the ranks measure; all of them call it, once loaded.
        exchange: gives bytes to all ranks and returns those of all, in order; all call it, as often, while they load.
        kv_files: rank -> descriptor of the memory for its KV, see worker.kv_file: on rank 0 those of all others, on
            these their own. None where no other process reads KV, or on GPUs.
    """

    rank: int = 0
    size: int = 1
    num_threads: int = 0
    communicator: Communicator | GpuCommunicator | None = None
    others: OtherRanks | None = None
    agree: Callable[[], None] = lambda: None
    smallest: Callable[[Callable[[], int]], int] = lambda measure: measure()
    exchange: Callable[[bytes], Sequence[bytes]] = lambda data: [data]
    kv_files: Mapping[int, int] = field(default_factory=dict)

    def of_first(self, find: Callable[[], int]) -> int:
        """Give every rank the number, 0 to 2^62, that rank 0 finds; all of them call it, while they load."""
        return self.smallest(find if self.rank == 0 else lambda: _MOST)

    @property
    def collectives(self) -> Collectives:
        """What is told of every attempt."""
        return self.communicator or NoCollectives()
