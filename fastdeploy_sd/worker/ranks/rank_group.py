"""A worker's view of its rank group. Values and callables; distributed/ connects the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.ranks.coordinator import Collectives, OtherRanks

# The measurement of ranks without one.
_MOST = 1 << 62


class NoCollectives:
    """Collectives of a process that exchanges nothing."""

    def begin(self, attempt: int) -> None:
        """There is no other rank to be in step with."""

    def fail(self) -> None:
        """There is no other rank."""


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where the service of a rank's experts finds the others.

    Attributes:
        file: descriptor of the memory that they share; see device.expert_service.
        shard: this rank among all over which experts are spread.
        timeout_s: how long one waits for another.
    """

    file: int
    shard: Shard
    timeout_s: float


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """A rank's place among `size`; by default the only one.

    Attributes:
        num_threads: of this rank's kernels: its share of the host's cores, unless configured.
        communicator: of the ranks inside a pass; None = nothing is exchanged.
        others: rank 0's interface to the other ranks; None on these, and on a single rank.
        agree: ranks other than 0 call it when their draft layers have run; see LoadedDraftModel.agree.
        smallest: returns the smallest measurement of all ranks; all of them call it, once loaded.
        exchange: all-gather of bytes, in order of the ranks; all call it, equally often, while they load.
        kv_files: rank -> descriptor of the memory for its KV, see kv.kv_file: on rank 0 those of all others, on
            these their own. None where no other process reads KV, or on GPUs.
        expert_place: None = experts are not spread.
        experts: the service of this rank's experts, from `with_experts` on.
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
    expert_place: ExpertPlace | None = None
    experts: ExpertService | None = None

    def of_first(self, find: Callable[[], int]) -> int:
        """Return the number, 0 to 2^62, that `find` returns on rank 0; all ranks call it, while they load."""
        return self.smallest(find if self.rank == 0 else lambda: _MOST)

    @property
    def collectives(self) -> Collectives:
        """The collectives, to begin and fail attempts."""
        return self.communicator or NoCollectives()
