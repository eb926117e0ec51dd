"""The engine's view of whatever keeps copies of KV blocks outside of the cache; commands and results are values.

A snapshot of a recurrent state is copied in pieces of a block's size. To the store they are blocks as well, with the
numbers after those of the KV cache's blocks: `num_state_pieces` for each snapshot.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """Copy a block to a slot, in place of what that holds."""

    command_id: int
    block_id: int
    slot: int
    content: CachedBlock


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Copy a slot to a block, if the slot holds this content."""

    command_id: int
    block_id: int
    slot: int
    content: CachedBlock


@dataclass(frozen=True, slots=True)
class EraseSlot:
    """Have a slot hold nothing, after a restart too."""

    command_id: int
    slot: int


Command = StoreBlock | LoadBlock | EraseSlot


class CopyStatus(enum.Enum):
    """DONE: all bytes are there. CANCELLED: it was withdrawn. DAMAGED: what was read is not what was written.

    FAILED: the system refused to read or write. After anything but DONE the target's bytes are undefined.
    """

    DONE = "done"
    CANCELLED = "cancelled"
    DAMAGED = "damaged"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The end of a command; `seconds` is what it took once it was begun."""

    command_id: int
    status: CopyStatus
    seconds: float


class BlockStore(Protocol):
    """Slots for copies of blocks, and copies that are made while the engine does something else.

    Every command has exactly one result, in any order. No call waits for one: `submit` and `take_results` return at
    once.
    """

    @property
    def num_slots(self) -> int:
        """Slots; constant."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that are copied; constant."""

    @property
    def num_state_pieces(self) -> int:
        """Blocks that a snapshot of a recurrent state is copied as; 0 = the model has no such states. Constant."""

    @property
    def fd(self) -> int:
        """A descriptor that is readable while there are results, and after `wake_after`; constant."""

    def kept(self) -> Sequence[tuple[int, CachedBlock]]:
        """Slots and their content from before the start, least recently written first. Asked once, before all else."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Begin commands, sooner or later. A block is in at most one that has not ended, and so is a target slot."""

    def cancel(self, block_ids: Sequence[int]) -> None:
        """Withdraw the copies from and to these blocks: when this returns, none of them is read or written.

        Waits for the piece of a block that is being copied at the moment, never for a disk. The results still come:
        CANCELLED, or another where the copy no longer needed the block.
        """

    def take_results(self) -> Sequence[CopyResult]:
        """Return the results since the last call; `fd` is not readable then until there is another."""

    def wake_after(self, seconds: float) -> None:
        """Make `fd` readable at that time, or sooner; only the first of several calls counts until it is."""
