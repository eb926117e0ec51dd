"""A block store for toy engines: copies at random moments, in pieces, and now and then damages or refuses one."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from fastdeploy_sd.engine.interfaces.block_store import (
    Command,
    CopyResult,
    CopyStatus,
    EraseSlot,
    LoadBlock,
    StoreBlock,
)
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock
from tests.doubles.toy_executor import ToyBlock, ToyExecutor

_GARBAGE = (-9, -9)


class ToyStore:
    """Makes some of the copies each time it is asked for results, so any number of steps lie between order and copy.

    Fails on orders that break the interface: a block in two copies, a slot that is read while it is written.

    Args:
        executor: whose caches hold the blocks.
        slots: what an earlier store left; None = nothing.
        damage_rate, failure_rate: of the copies from slots that find other bytes / of all that the system refuses.

    Attributes:
        slots: slot -> content and bytes; the bytes are None once they are damaged.
        num_damaged, num_failed: what it did on purpose.
    """

    block_bytes, num_state_pieces = 1, 0

    def __init__(
        self,
        executor: ToyExecutor,
        num_slots: int,
        seed: int,
        *,
        slots: dict[int, tuple[CachedBlock, ToyBlock]] | None = None,
        damage_rate: float = 0.0,
        failure_rate: float = 0.0,
    ) -> None:
        self.num_slots, self.slots = num_slots, dict(slots or {})
        self.num_damaged = self.num_failed = 0
        self.is_prompt = False
        self._executor, self._random = executor, random.Random(seed)
        self._damage_rate, self._failure_rate = damage_rate, failure_rate
        self._kept = [(slot, content) for slot, (content, _) in self.slots.items()]
        self._orders: list[Command] = []
        self._results: list[CopyResult] = []
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)

    def kept(self) -> list[tuple[int, CachedBlock]]:
        return self._kept

    def submit(self, commands: Sequence[Command]) -> None:
        for command in commands:
            blocks = {c.block_id for c in self._orders if not isinstance(c, EraseSlot)}
            assert isinstance(command, EraseSlot) or command.block_id not in blocks, f"two copies of a block: {command}"
            targets = {c.slot for c in self._orders if isinstance(c, StoreBlock)}
            assert isinstance(command, EraseSlot) or command.slot not in targets, f"a slot that is written: {command}"
            self._orders.append(command)

    def cancel(self, block_ids: Sequence[int]) -> None:
        for command in [c for c in self._orders if not isinstance(c, EraseSlot) and c.block_id in block_ids]:
            if isinstance(command, LoadBlock) and self._random.random() < 0.5:
                self._executor.write_block(command.block_id, ((_GARBAGE,), (_GARBAGE,)))  # it was half way
            is_late = isinstance(command, StoreBlock) and self._random.random() < 0.3  # only the slot was to be written
            self._end(command, self._make(command) if is_late else CopyStatus.CANCELLED)

    def take_results(self) -> list[CopyResult]:
        while self._orders and (self.is_prompt or self._random.random() < 0.4):
            loads = [c for c in self._orders if isinstance(c, LoadBlock)]
            command = self._random.choice(loads) if loads and self._random.random() < 0.7 else self._orders[0]
            self._end(command, self._make(command))
        results, self._results = self._results, []
        return results

    def wake_after(self, seconds: float) -> None:
        assert seconds > 0

    def _make(self, command: Command) -> CopyStatus:
        if isinstance(command, EraseSlot):
            self.slots.pop(command.slot, None)
            return CopyStatus.DONE
        if self._random.random() < self._failure_rate:
            self.num_failed += 1
            return CopyStatus.FAILED
        if isinstance(command, StoreBlock):
            self.slots[command.slot] = (command.content, self._executor.read_block(command.block_id))
            return CopyStatus.DONE
        if command.slot not in self.slots or self._random.random() < self._damage_rate:
            self.num_damaged += 1
            return CopyStatus.DAMAGED
        content, kv = self.slots[command.slot]
        assert content == command.content, f"{command}, but the slot holds {content}"
        self._executor.write_block(command.block_id, kv)
        return CopyStatus.DONE

    def _end(self, command: Command, status: CopyStatus) -> None:
        self._orders.remove(command)
        self._results.append(CopyResult(command.command_id, status, 0.001))
