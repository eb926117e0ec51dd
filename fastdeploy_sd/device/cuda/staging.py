"""Memory on both sides of a copy to a GPU. Knows neither what is copied nor when."""

from __future__ import annotations

from fastdeploy_sd.device.cuda.handles import new_event
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import CudaMemory, pinned_zeros


class StagingMemory:
    """Pinned memory of the host and as much of the GPU's, for things on their way up.

    Attributes:
        host: u8[num_bytes], pinned.
        address: of num_bytes of the GPU's memory. memory: what keeps them.
        event: whoever uses the memory records it behind the last use, and waits for it before the next.

    Raises:
        MemoryError: there is no pinned memory, or none of the GPU's.
    """

    def __init__(self, library: CudaLibrary, memory: CudaMemory, num_bytes: int) -> None:
        self.host = pinned_zeros(library, num_bytes)
        self.memory, self.address = memory.take(num_bytes)
        self.event = new_event(library)
