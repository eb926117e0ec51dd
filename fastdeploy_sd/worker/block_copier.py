"""BlockCopier: copies KV blocks to slots and back in a thread of its own. Knows no scheduling."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.engine.block_store import (
    Command,
    CopyResult,
    CopyStatus,
    EraseSlot,
    LoadBlock,
    StoreBlock,
)
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.kvcache.prefix_cache import CachedBlock
from fastdeploy_sd.worker.swap_file import DamagedSlotError, SwapFile

_log = logging.getLogger(__name__)
# One page is copied in well under a millisecond, unless the machine does not run the thread.
_CANCEL_DEADLINE_S = 60.0
_MAX_LOGGED_ERRORS = 10


class Pages(Protocol):
    """The bytes of blocks, layer by layer; see KvPages."""

    num_layers: int

    def page_bytes(self, layer: int) -> int:
        """Return the length of a page of this layer."""
        ...

    def read(self, layer: int, block_id: int) -> tuple[npt.NDArray[np.uint8], ...]:
        """Return the parts of a page, u8[n] each."""
        ...

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page with its parts, behind each other."""
        ...


class BlockCopier:
    """See engine.block_store.BlockStore. One thread makes all copies: loads first, as requests wait for them.

    A block is copied into memory of the thread's own, page by page, before it is written to its slot, and the other
    way round: the blocks themselves are touched for as long as copying memory takes, whatever the disk does, and a
    cancelled copy stops at the next page.

    Args:
        pages: of the KV cache. file: the slots; closed by `close`.
    """

    def __init__(self, pages: Pages, file: SwapFile) -> None:
        self._pages, self._file = pages, file
        self._staging = np.empty(file.block_bytes, np.uint8)
        num_bytes = sum(pages.page_bytes(layer) for layer in range(pages.num_layers))
        assert num_bytes == file.block_bytes, f"pages of {num_bytes} bytes, slots of {file.block_bytes}"
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._loads: dict[int, LoadBlock] = {}  # by block, oldest first
        self._stores: dict[int, StoreBlock | EraseSlot] = {}  # by block; an erased slot by -1 - its number
        self._results: list[CopyResult] = []
        self._is_signalled = False  # whether `fd` is readable
        self._timer: threading.Timer | None = None
        self._current: int | None = None  # the block of the copy that is being made
        self._is_touched = False  # whether that block's bytes are read or written now
        self._is_stopped = False  # whether they should not be
        self._is_closing = False
        self._num_errors = 0
        self._thread = threading.Thread(target=self._run, name="kv-swap", daemon=True)
        self._thread.start()

    @property
    def num_slots(self) -> int:
        return self._file.num_slots

    @property
    def block_bytes(self) -> int:
        return self._file.block_bytes

    @property
    def fd(self) -> int:
        return self._fd

    def kept(self) -> Sequence[tuple[int, CachedBlock]]:
        return self._file.kept()

    def submit(self, commands: Sequence[Command]) -> None:
        with self._changed:
            for command in commands:
                match command:
                    case LoadBlock():
                        self._loads[command.block_id] = command
                    case StoreBlock():
                        self._stores[command.block_id] = command
                    case EraseSlot():
                        self._stores[-1 - command.slot] = command
            self._changed.notify_all()

    def cancel(self, block_ids: Sequence[int]) -> None:
        with self._changed:
            for block_id in block_ids:
                for queue in (self._loads, self._stores):
                    command = queue.pop(block_id, None)
                    if command is not None:
                        self._end(command, CopyStatus.CANCELLED, 0.0)
            if self._current in block_ids:
                self._is_stopped = True
                if not self._changed.wait_for(lambda: not self._is_touched, _CANCEL_DEADLINE_S):
                    raise InternalError(f"a copy of KV block {self._current} does not stop")

    def take_results(self) -> Sequence[CopyResult]:
        if not self._is_signalled:
            return ()
        with self._changed:
            os.eventfd_read(self._fd)
            self._is_signalled = False
            results, self._results = self._results, []
            return results

    def wake_after(self, seconds: float) -> None:
        with self._changed:
            if self._timer is None and not self._is_closing:
                self._timer = threading.Timer(seconds, self._wake)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """End the thread after the copy it makes, and give the slots back. May be called twice."""
        with self._changed:
            self._is_closing = self._is_stopped = True
            timer = self._timer
            self._changed.notify_all()
        if timer is not None:
            timer.cancel()
            timer.join()
        self._thread.join()
        self._file.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (command := self._next()) is not None:
            begin = time.perf_counter()
            try:
                status = self._make(command)
            except Exception as error:  # a thread that ended would leave everybody waiting
                status = CopyStatus.FAILED
                self._report(f"{type(command).__name__} of slot {command.slot} failed: {error!r}")
            with self._changed:
                self._current = None
                self._end(command, status, time.perf_counter() - begin)

    def _next(self) -> Command | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._loads or self._stores)
            queue: dict[int, LoadBlock] | dict[int, StoreBlock | EraseSlot] = self._loads or self._stores
            if self._is_closing:
                return None
            command = queue.pop(next(iter(queue)))
            self._is_stopped = False
            self._current = None if isinstance(command, EraseSlot) else command.block_id
            self._is_touched = isinstance(command, StoreBlock)
            return command

    def _make(self, command: Command) -> CopyStatus:
        match command:
            case EraseSlot():
                self._file.erase(command.slot)
                return CopyStatus.DONE
            case StoreBlock():
                try:
                    is_whole = self._read_block(command.block_id)
                finally:
                    self._let_go()
                if is_whole:
                    self._file.write(command.slot, command.content, self._staging)
            case LoadBlock():
                try:
                    self._file.read(command.slot, command.content, self._staging)
                except DamagedSlotError as error:
                    self._report(f"{error}; the block is computed again")
                    return CopyStatus.DAMAGED
                with self._changed:
                    self._is_touched = True
                try:
                    is_whole = self._write_block(command.block_id)
                finally:
                    self._let_go()
        return CopyStatus.DONE if is_whole else CopyStatus.CANCELLED

    def _read_block(self, block_id: int) -> bool:
        position = 0
        for layer in range(self._pages.num_layers):
            if self._is_stopped:
                return False
            for part in self._pages.read(layer, block_id):
                self._staging[position : position + part.nbytes] = part
                position += part.nbytes
        return True

    def _write_block(self, block_id: int) -> bool:
        position = 0
        for layer in range(self._pages.num_layers):
            if self._is_stopped:
                return False
            end = position + self._pages.page_bytes(layer)
            self._pages.write(layer, block_id, self._staging.data[position:end])
            position = end
        return True

    def _let_go(self) -> None:
        with self._changed:
            self._is_touched = False
            self._changed.notify_all()

    def _end(self, command: Command, status: CopyStatus, seconds: float) -> None:
        self._results.append(CopyResult(command.command_id, status, seconds))
        self._signal()

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            os.eventfd_write(self._fd, 1)

    def _wake(self) -> None:
        with self._changed:
            self._timer = None
            self._signal()

    def _report(self, what: str) -> None:
        self._num_errors += 1
        if self._num_errors <= _MAX_LOGGED_ERRORS:
            last = "; no more of these lines follow" if self._num_errors == _MAX_LOGGED_ERRORS else ""
            _log.warning("swap space: %s%s", what, last)
