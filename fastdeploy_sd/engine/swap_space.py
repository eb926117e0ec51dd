"""SwapSpace: the second level of the prefix cache. Decides what is copied to slots and back, and moves no byte itself.

A block is stored when it is published, so it can be given away later without waiting for a copy. A request is first
matched with the blocks of the cache; where these end, the match goes on in the slots, and the request waits until what
was found is loaded into its own blocks.

With recurrent states the match ends where a snapshot does, in the cache or in slots. Its pieces are copied as blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fastdeploy_sd.engine.interfaces.block_store import (
    BlockStore,
    Command,
    CopyResult,
    CopyStatus,
    EraseSlot,
    LoadBlock,
    StoreBlock,
)
from fastdeploy_sd.engine.interfaces.kv_connector import SWAP, KvArrival
from fastdeploy_sd.engine.kvcache.block_table import NO_BLOCK, BlockTable, PrefixMatch
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock
from fastdeploy_sd.engine.kvcache.prefix_matcher import Find
from fastdeploy_sd.engine.kvcache.state_pieces import StatePieces
from fastdeploy_sd.engine.kvcache.swap_index import SwapIndex
from fastdeploy_sd.types import I32, NO_STATE, Request, RequestId
from fastdeploy_sd.types.stats import SwapStats

# Far above what a disk takes; what has not come by then is computed instead.
LOAD_DEADLINE_S = 10.0


@dataclass(slots=True, eq=False)
class _Load:
    """What a request waits for: blocks in the order of its tokens, of which the first `num_good` are or may be written.

    The pieces of a snapshot come last; `state`: its content, None = the model has no such states.

    `pending` maps commands that have not ended to positions in `block_ids`; `end`: tokens whose KV is there then. With
    windows less than all of it is of no use, as there are no blocks to compute the rest from.
    """

    num_cached_tokens: int
    end: int
    block_ids: list[int]
    deadline: float
    num_good: int
    state: CachedBlock | None = None
    pending: dict[int, int] = field(default_factory=dict)


class SwapSpace:
    """A KVConnector and a CacheListener; for the thread that steps the engine. `kv` reports to it from now on."""

    def __init__(self, kv: KVCacheManager, store: BlockStore, load_deadline_s: float = LOAD_DEADLINE_S) -> None:
        self._kv, self._store, self._load_deadline_s = kv, store, load_deadline_s
        self._index = SwapIndex(store.num_slots)
        self._index.restore(store.kept())
        self._num_commands = 0
        self._commands: dict[int, Command] = {}  # that have not ended
        self._storing: dict[int, int] = {}  # block -> the command that reads it
        self._waiting: dict[int, RequestId] = {}  # command -> who waits for it
        self._loads: dict[RequestId, _Load] = {}
        self._counted = SwapStats(
            num_slots=store.num_slots, block_bytes=store.block_bytes, num_restored=self._index.num_used_slots
        )
        self.fd: int | None = store.fd
        kv.listener = self
        self._pieces: StatePieces | None = None
        if kv.states is not None:
            size = kv.groups[0].block_size
            self._pieces = kv.states.listener = StatePieces(self, kv.num_blocks, store.num_state_pieces, size)

    def published(self, block_id: int, content: CachedBlock) -> None:
        """Store the block, unless a slot has its content or every slot is being copied."""
        reserved = self._index.reserve(content)
        if reserved is None:
            return
        slot, is_eviction = reserved
        self._count(num_begun_stores=1, num_evicted=int(is_eviction))
        self._storing[block_id] = self._submit(StoreBlock(self._next_id(), block_id, slot, content))

    def lost(self, block_ids: Sequence[int]) -> None:
        """Stop reading these blocks. What had not been copied is not worth a wait."""
        stored = [block_id for block_id in block_ids if self._storing.pop(block_id, None) is not None]
        if stored:
            self._store.cancel(stored)

    def discarded(self, block_hashes: Sequence[bytes]) -> None:
        """Forget these contents, after a restart too."""
        for block_hash in block_hashes:
            self._forget(block_hash)

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        """Load what the slots hold after the cached tokens, whole blocks, and never all the tokens."""
        table, block_size = self._kv.table(request.request_id), self._kv.block_size
        first, num_full = num_cached_tokens // block_size, (len(token_ids) - 1) // block_size

        def find(g: int, i: int, content: CachedBlock) -> int | None:
            if i >= first:
                return self._index.slot(content)
            return None if table.groups[g].block_ids[i] == NO_BLOCK else table.groups[g].block_ids[i]

        found = self._longest(table, token_ids, find)
        for own in table.groups:
            self._index.touch(own.hashes[: found.num_tokens // block_size])
        is_hit = found.num_tokens > num_cached_tokens
        is_hit = is_hit and self._kv.skip_to(table, found.num_tokens, len(token_ids))
        state, parts = self._expect_state(table, token_ids, found) if is_hit else (None, [])
        is_hit = is_hit and (self._pieces is None or state is not None)
        self._count(num_lookups=int(num_full > first), num_hits=int(is_hit), num_queried_blocks=num_full - first)
        if not is_hit:
            return False
        load = _Load(num_cached_tokens, found.num_tokens, [], time.monotonic() + self._load_deadline_s, 0, state)
        copies = [
            (own.block_ids[i], slots[i], self._kv.prefixes.describe_block(table, token_ids, i, g))
            for g, (own, slots) in enumerate(zip(table.groups, found.block_ids, strict=True))
            for i in range(max(first, own.num_freed), len(slots))
        ]
        commands = [LoadBlock(self._next_id(), *copy) for copy in (*copies, *parts)]
        for position, command in enumerate(commands):
            self._index.pin(command.slot)
            self._commands[command.command_id], self._waiting[command.command_id] = command, request.request_id
            load.pending[command.command_id] = position
        self._count(num_begun_loads=len(commands))
        load.block_ids, load.num_good = [command.block_id for command in commands], len(commands)
        self._loads[request.request_id] = load
        self._store.submit(commands)
        self._store.wake_after(self._load_deadline_s)
        return True

    def cancel(self, request_id: RequestId) -> None:
        """Stop writing to a request's blocks; see KVConnector."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._store.cancel(load.block_ids)

    def arrivals(self) -> Sequence[KvArrival]:
        """Return who has got its blocks, or has waited for too long; see KVConnector."""
        for result in self._store.take_results():
            self._settle(result)
        if not self._loads:
            return ()
        now = time.monotonic()
        ended = [name for name, load in self._loads.items() if not load.pending or now >= load.deadline]
        arrivals = [self._end(name, self._loads.pop(name)) for name in ended]
        if self._loads:
            self._store.wake_after(min(load.deadline for load in self._loads.values()) - now)
        return arrivals

    def stats(self) -> SwapStats:
        """Return the counters so far, and how many slots are in use now."""
        return replace(self._counted, num_used_slots=self._index.num_used_slots)

    def check_integrity(self) -> None:
        """Verify that index, commands and loads agree. O(slots); for tests and debug mode."""
        self._index.check_integrity()
        expected = {i for i, command in self._commands.items() if isinstance(command, LoadBlock)}
        assert set(self._waiting) == expected, "an unknown load"
        for block_id, command_id in self._storing.items():
            command = self._commands[command_id]
            assert isinstance(command, StoreBlock), f"block {block_id} is read by {command}"
            assert command.block_id == block_id, f"block {block_id} is read by {command}"
        for name, load in self._loads.items():
            table = self._kv.table(name)
            own = {*table.block_ids, *(() if self._pieces is None else self._pieces.ids(table.states.arriving))}
            assert set(load.block_ids) <= own, f"{name}: loads into others' blocks"
            assert all(self._waiting[i] == name for i in load.pending), f"{name}: a load of another request"

    def _longest(self, table: BlockTable, token_ids: I32, find: Find) -> PrefixMatch:
        if self._kv.states is None:
            return self._kv.prefixes.longest(table, token_ids, len(token_ids), find)
        found = self._kv.states.longest(table, token_ids, len(token_ids), find, self._has_state)
        self._kv.states.note_branch(table, found)
        return found

    def _has_state(self, block_hash: bytes) -> bool:
        assert self._pieces is not None, "a model with recurrent states"
        return all(self._index.slot(part) is not None for part in self._pieces.contents(block_hash))

    def _expect_state(
        self, table: BlockTable, token_ids: I32, found: PrefixMatch
    ) -> tuple[CachedBlock | None, list[tuple[int, int, CachedBlock]]]:
        """Return the content of the snapshot that a match ends with, and what to load: piece, slot and content.

        (None, ..) = the model has no such states, or there is no place for it.
        """
        if self._kv.states is None or self._pieces is None:
            return None, []
        size = self._kv.groups[0].block_size
        content = self._kv.prefixes.describe_block(table, token_ids, found.num_tokens // size - 1)
        if found.snapshot != NO_STATE:
            self._kv.states.expect_known(table, found.snapshot)
            return content, []
        snapshot = self._kv.states.expect(table)
        if snapshot is None:
            return None, []
        parts = list(self._pieces.contents(content.hash))
        self._index.touch([part.hash for part in parts])
        slots = [self._index.slot(part) for part in parts]
        pieces = zip(self._pieces.ids(snapshot), slots, parts, strict=True)
        return content, [(piece, slot, part) for piece, slot, part in pieces if slot is not None]

    def _end(self, name: RequestId, load: _Load) -> KvArrival:
        num_loaded = min([load.num_good, *load.pending.values()])
        if load.pending:
            self._store.cancel(load.block_ids)
            self._count(num_late=1)
        if num_loaded < len(load.block_ids) and not self._kv.prefixes.is_plain:
            return KvArrival(name, load.num_cached_tokens, is_lost=True)
        is_whole = num_loaded == len(load.block_ids)
        num_tokens = load.end if is_whole else load.num_cached_tokens + num_loaded * self._kv.block_size
        if self._kv.states is not None:
            self._kv.states.take_arrival(self._kv.table(name), has_come=is_whole, content=load.state)
            num_tokens = load.end if is_whole else load.num_cached_tokens  # a state is at the end only
        num_new = num_tokens - load.num_cached_tokens
        return KvArrival(name, num_tokens, origins={SWAP: num_new} if num_new else {})

    def _settle(self, result: CopyResult) -> None:
        command, is_done = self._commands.pop(result.command_id), result.status is CopyStatus.DONE
        self._count(num_failed=int(result.status is CopyStatus.FAILED))
        match command:
            case StoreBlock():
                if self._storing.get(command.block_id) == command.command_id:
                    del self._storing[command.block_id]
                if is_done:
                    self._index.set_ready(command.slot)
                    self._count(num_stored=1, store_seconds=result.seconds)
                self._count(num_lost=int(result.status is CopyStatus.CANCELLED))
                self._index.unpin(command.slot)
            case LoadBlock():
                match result.status:
                    case CopyStatus.DONE:
                        self._count(num_loaded=1, load_seconds=result.seconds)
                    case CopyStatus.CANCELLED:
                        self._count(num_withdrawn=1)
                    case CopyStatus.DAMAGED:
                        self._count(num_damaged=1)
                        self._forget(command.content.hash)
                    case CopyStatus.FAILED:
                        self._forget(command.content.hash)
                self._index.unpin(command.slot)
                self._note_load(command.command_id, is_done)
            case EraseSlot():
                pass

    def _note_load(self, command_id: int, is_done: bool) -> None:
        load = self._loads.get(self._waiting.pop(command_id))
        position = None if load is None else load.pending.pop(command_id, None)  # it may have begun anew
        if load is not None and position is not None and not is_done:
            load.num_good = min(load.num_good, position)

    def _forget(self, block_hash: bytes) -> None:
        slot = self._index.drop(block_hash)
        if slot is not None:
            # Copies to a slot are made in their order, so this empties it before another content comes.
            self._submit(EraseSlot(self._next_id(), slot))

    def _submit(self, command: Command) -> int:
        self._commands[command.command_id] = command
        self._store.submit([command])
        return command.command_id

    def _next_id(self) -> int:
        self._num_commands += 1
        return self._num_commands

    def _count(self, **counts: float) -> None:
        for name, count in counts.items():
            if count:
                setattr(self._counted, name, getattr(self._counted, name) + count)
