"""The least time that a GPU can take for what must be moved, multiplied and issued, by the figures of its maker.

Bytes count once, operations at the rate of dense matrices with sums in 32 bits, instructions as compiled kernels need
them for a tile of their work; the largest of these times is the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from custom_ops.cuda_tiles import Tile

Numbers = Literal["bfloat16", "int8", "fp8"]
Limit = Literal["memory", "products", "issue"]
_REGISTERS, _REGISTER_UNIT, _WARP, _ISSUED = 65_536, 256, 32, 4
# Of a block, that the system keeps for itself.
_SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class GpuChip:
    """One GPU.

    Attributes:
        name: a part of what its driver calls it.
        architecture: that its kernels are compiled for.
        tflop_per_s: by the numbers that are multiplied; without fp8 where it has no such products.
        multiprocessors, ghz: how many there are, and the clock at which they multiply that fast.
        shared_bytes, max_threads, max_blocks: of a multiprocessor.
    """

    name: str
    architecture: str
    gb_per_s: float
    tflop_per_s: Mapping[Numbers, float]
    multiprocessors: int
    ghz: float
    shared_bytes: int
    max_threads: int
    max_blocks: int

    def bound(
        self, num_bytes: int, num_operations: int, numbers: Numbers, issued: float | None = None
    ) -> tuple[float, Limit]:
        """Return the least seconds and what limits them; products that it lacks are made in bfloat16.

        issued: what `issue_seconds` found.
        """
        rate = self.tflop_per_s.get(numbers, self.tflop_per_s["bfloat16"])
        times: dict[Limit, float] = {
            "memory": num_bytes / self.gb_per_s / 1e9,
            "products": num_operations / rate / 1e12,
            "issue": issued or 0.0,
        }
        limit = max(times, key=times.__getitem__)
        return times[limit], limit

    def issue_seconds(self, num_bytes: int, num_operations: int, tiles: Iterable[Tile]) -> float | None:
        """Return the least seconds in which kernels can issue what their tiles need; None: no tile is of such work.

        The kernel that needs the least instructions is taken to do all the work: its operations, or without any its
        bytes.
        """
        works = [(tile.operations if num_operations > 0 else tile.num_bytes, tile.instructions) for tile in tiles]
        costs = [instructions / work for work, instructions in works if work > 0]
        if not costs:
            return None
        return min(costs) * (num_operations or num_bytes) / self._issued_per_s

    @property
    def _issued_per_s(self) -> float:
        """Every multiprocessor issues four instructions in a clock."""
        return _ISSUED * self.multiprocessors * self.ghz * 1e9

    def issue_share(self, tile: Tile) -> float:
        """Return what the instructions of a kernel's tile allow of the rate of matrix units, or without them of memory.

        Below 1 they bound the kernel.
        """
        per_s = self._issued_per_s / tile.instructions
        if tile.operations > 0:
            rate = next((rate for numbers, rate in self.tflop_per_s.items() if numbers == tile.numbers), None)
            return per_s * tile.operations / (rate or self.tflop_per_s["bfloat16"]) / 1e12
        return per_s * tile.num_bytes / self.gb_per_s / 1e9

    def occupancy(self, registers: int, shared_bytes: int, threads: int) -> float:
        """Return the part of a multiprocessor's threads that blocks of a kernel fill; 0: one does not fit.

        Args:
            registers: of a thread.
            shared_bytes, threads: of a block.
        """
        warps = -(-threads // _WARP)
        warp_registers = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        fit = min(
            self.max_blocks,
            self.max_threads // (warps * _WARP),
            _REGISTERS // (warp_registers * warps),
            self.shared_bytes // (shared_bytes + _SYSTEM_SHARED_BYTES),
        )
        return fit * warps * _WARP / self.max_threads


# Sources: NVIDIA's data sheets and white papers of Ampere, Hopper, Ada and Blackwell; CUDA's programming guide for the
# limits of a multiprocessor.
CHIPS: Sequence[GpuChip] = (
    GpuChip("A100", "80", 2039, {"bfloat16": 312, "int8": 624}, 108, 1.41, 164 << 10, 2048, 32),
    GpuChip("H100", "90a", 3352, {"bfloat16": 989, "int8": 1979, "fp8": 1979}, 132, 1.83, 228 << 10, 2048, 32),
    GpuChip("H200", "90a", 4800, {"bfloat16": 989, "int8": 1979, "fp8": 1979}, 132, 1.83, 228 << 10, 2048, 32),
    GpuChip("RTX 4090", "89", 1008, {"bfloat16": 165, "int8": 661, "fp8": 330}, 128, 2.52, 100 << 10, 1536, 24),
    GpuChip("RTX 5090", "120", 1792, {"bfloat16": 210, "int8": 838, "fp8": 419}, 170, 2.41, 100 << 10, 1536, 24),
)


def chip_named(text: str) -> GpuChip | None:
    """Return the GPU that a driver's name of one tells, None where it is not in the table."""
    return next((chip for chip in CHIPS if chip.name in text), None)
