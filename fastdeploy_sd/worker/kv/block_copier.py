"""BlockCopier: copies KV blocks to slots and back in its own thread. Knows no scheduling."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
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
from fastdeploy_sd.errors import DeviceLost, device_lost_as_error
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.worker.kv.block_mover import BlockMover
from fastdeploy_sd.worker.kv.swap_file import DamagedSlotError, SwapFile

_log = logging.getLogger(__name__)
_MAX_LOGGED_ERRORS = 10


class BlockCopier:
    """See interfaces.block_store.BlockStore. One thread makes all copies: loads first, as requests wait for them.

    Blocks go through the mover's own memory on their way to a slot and back. So a block is in use only for a copy of
    memory, however slow the disk is. `mover`: of the KV cache. file: the slots; closed by `close`.
    num_state_pieces: see BlockStore.
    """

    def __init__(self, mover: BlockMover, file: SwapFile, num_state_pieces: int = 0) -> None:
        self._mover, self._file, self.num_state_pieces = mover, file, num_state_pieces
        assert mover.block_bytes == file.block_bytes, (
            f"blocks of {mover.block_bytes} bytes, slots of {file.block_bytes}"
        )
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._loads: dict[int, LoadBlock] = {}  # by block, oldest first
        self._stores: dict[int, StoreBlock | EraseSlot] = {}  # by block; an erased slot by -1 - its number
        self._results: list[CopyResult] = []
        self._loaded: list[int] = []  # blocks of loads among the results
        self._is_signalled = False  # whether `fd` is readable
        self._timer: threading.Timer | None = None
        self._is_closing = False
        self._lost: DeviceLost | None = None  # the error, once the device is lost
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
        with device_lost_as_error():
            self._mover.follow_steps()
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
        with device_lost_as_error():
            self._mover.release(block_ids)

    def take_results(self) -> Sequence[CopyResult]:
        if not self._is_signalled:
            return ()
        with self._changed:
            os.eventfd_read(self._fd)
            self._is_signalled = False
            results, self._results = self._results, []
            loaded, self._loaded = self._loaded, []
        with device_lost_as_error():
            if self._lost is not None:
                raise self._lost
            self._mover.release(loaded)  # steps that read them are about to be started
        return results

    def wake_after(self, seconds: float) -> None:
        with self._changed:
            if self._timer is None and not self._is_closing:
                self._timer = threading.Timer(seconds, self._wake)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """End the thread after its current copy, and free the slots. May be called twice."""
        with self._changed:
            self._is_closing = True
            timer = self._timer
            self._changed.notify_all()
        if timer is not None:
            timer.cancel()
            timer.join()
        self._thread.join()
        self._mover.close()
        self._file.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next():
            begin = time.perf_counter()
            try:
                statuses = self._make(batch)
            except (Exception, DeviceLost) as error:  # if the thread ended, its callers would wait for ever
                statuses = [CopyStatus.FAILED] * len(batch)
                self._report_failure(batch[0], error)
                if isinstance(error, DeviceLost):
                    self._lost = error
            seconds = (time.perf_counter() - begin) / len(batch)
            with self._changed:
                for command, status in zip(batch, statuses, strict=True):
                    self._end(command, status, seconds)

    def _next(self) -> Sequence[Command]:
        """Wait for commands, and take the oldest ones of a kind; none when the thread must end.

        Copies to a slot are made in order: commands after one of another kind wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._loads or self._stores)
            queue: dict[int, LoadBlock] | dict[int, StoreBlock | EraseSlot] = self._loads or self._stores
            if self._is_closing:
                return ()
            first = next(iter(queue.values()))
            if isinstance(first, EraseSlot):
                return [queue.pop(next(iter(queue)))]
            alike = itertools.takewhile(lambda key: type(queue[key]) is type(first), queue)
            block_ids = list(itertools.islice(alike, self._mover.max_blocks))
            self._mover.begin(block_ids)
            return [queue.pop(block_id) for block_id in block_ids]

    def _make(self, batch: Sequence[Command]) -> Sequence[CopyStatus]:
        match batch[0]:
            case EraseSlot():
                self._file.erase(batch[0].slot)
                return [CopyStatus.DONE]
            case StoreBlock():
                are_there = self._mover.read()
                rows = self._mover.rows()
                return [
                    self._write_slot(command, row) if is_there else CopyStatus.CANCELLED
                    for command, row, is_there in zip(batch, rows, are_there, strict=False)
                ]
            case LoadBlock():
                found = [self._read_slot(command, row) for command, row in zip(batch, self._mover.rows(), strict=False)]
                are_written = self._mover.write([status is CopyStatus.DONE for status in found])
                return [
                    CopyStatus.CANCELLED if status is CopyStatus.DONE and not is_written else status
                    for status, is_written in zip(found, are_written, strict=True)
                ]

    def _write_slot(self, command: Command, row: Bytes) -> CopyStatus:
        assert isinstance(command, StoreBlock), f"stores {command}"
        try:
            self._file.write(command.slot, command.content, row)
        except Exception as error:
            self._report_failure(command, error)
            return CopyStatus.FAILED
        return CopyStatus.DONE

    def _read_slot(self, command: Command, row: Bytes) -> CopyStatus:
        assert isinstance(command, LoadBlock), f"loads {command}"
        try:
            self._file.read(command.slot, command.content, row)
        except DamagedSlotError as error:
            self._report(f"{error}; the block is computed again")
            return CopyStatus.DAMAGED
        except Exception as error:
            self._report_failure(command, error)
            return CopyStatus.FAILED
        return CopyStatus.DONE

    def _end(self, command: Command, status: CopyStatus, seconds: float) -> None:
        self._results.append(CopyResult(command.command_id, status, seconds))
        if isinstance(command, LoadBlock) and status is CopyStatus.DONE:
            self._loaded.append(command.block_id)
        self._signal()

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            os.eventfd_write(self._fd, 1)

    def _wake(self) -> None:
        with self._changed:
            self._timer = None
            self._signal()

    def _report_failure(self, command: Command, error: BaseException) -> None:
        self._report(f"{type(command).__name__} of slot {command.slot} failed: {error!r}")

    def _report(self, what: str) -> None:
        self._num_errors += 1
        if self._num_errors <= _MAX_LOGGED_ERRORS:
            last = "; no more of these lines follow" if self._num_errors == _MAX_LOGGED_ERRORS else ""
            _log.warning("swap space: %s%s", what, last)
