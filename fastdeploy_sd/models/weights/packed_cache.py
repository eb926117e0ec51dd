"""Keeps packed weights between starts: which file belongs to a checkpoint, when it may be used, and who writes it.

A file that does not fit is not used: a warning says why, and the weights are packed and written again. Knows no layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

import fastdeploy_sd
from fastdeploy_sd.device.checksum import packed_layout_version
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.quant_scheme import SCHEME_VERSION, QuantScheme
from fastdeploy_sd.models.sharding import RULES_VERSION
from fastdeploy_sd.models.weights.packed_file import Key, PackedFile, PackedFileError, write_packed_file
from fastdeploy_sd.models.weights.shared_weights import SharedWeights, shared_part
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.process.files import remove_unfinished
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard

_OPTION = "packed_weights_cache"
_log = logging.getLogger(__name__)


class PackedMatrices(Mapping[str, Bytes]):
    """A PackedStore over a file's matrices and those that are added to them: name -> u8[n].

    A matrix in a device's memory is read each time it is asked for.

    Args:
        take: returns zeros u8[n] at a multiple of 4096, for a matrix that will be added.
        kept: what is found there is copied to memory of `take`, and it gets what is added.
    """

    def __init__(
        self,
        file: PackedFile | None,
        take: Callable[[int], Bytes] | None = None,
        kept: PackedMatrices | None = None,
    ) -> None:
        self._matrices: dict[str, Bytes | Callable[[], Bytes]] = {} if file is None else dict(file.matrices)
        self._kept, self.has_new = kept, False
        self.take = take or WeightMemory().take

    def __getitem__(self, name: str) -> Bytes:
        found = self._matrices[name]
        return found() if callable(found) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)

    def find(self, name: str, num_bytes: int) -> Bytes | None:
        data = self._matrices.get(name)
        if data is None and self._kept is not None and (found := self._kept.find(name, num_bytes)) is not None:
            data = self._matrices[name] = self.take(num_bytes)
            data[:] = found
        return data if isinstance(data, np.ndarray) and data.nbytes == num_bytes else None

    def add(self, name: str, data: Bytes | Callable[[], Bytes]) -> None:
        self._matrices[name] = data
        self.has_new = True
        if self._kept is not None:
            self._kept.add(name, data)


@contextlib.contextmanager
def packed_matrices(
    folder: Path | None,
    checkpoint: WeightSource,
    scheme: QuantScheme,
    part: str,
    shard: Shard = WHOLE_MODEL,
    shared: SharedWeights | None = None,
) -> Iterator[PackedMatrices | None]:
    """Yield the packed matrices that memory of all engines holds for a checkpoint, or else a folder.

    What the body adds is in both at its end. `shared`: None = no memory is shared. The first process to come packs, or
    reads the folder's file; the others wait for it, and map what it has. One that finds a matrix missing has its own.

    Raises ConfigError: the folder cannot be created.
    """
    if folder is None and shared is None:
        yield None
        return
    key, name = cache_key(checkpoint, scheme, part, shard), file_name(checkpoint, scheme, part, shard)
    with shared_part(shared, name, key) as memory:
        if memory is not None and memory.found is not None:
            yield PackedMatrices(memory.found)
            return
        with _kept_matrices(folder, checkpoint, key, name) as kept:
            if memory is None:
                yield kept
                return
            found = PackedMatrices(None, memory.take, kept)
            yield found
            if checkpoint.is_unchanged():
                memory.write(found)


@contextlib.contextmanager
def _kept_matrices(
    folder: Path | None, checkpoint: WeightSource, key: Key, name: str
) -> Iterator[PackedMatrices | None]:
    """Yield the packed matrices that a folder holds for a checkpoint; what the body adds is written at its end.

    Processes that find no usable file take turns, so that one packs and the others read its file. Writing what a usable
    file lacks takes a turn too. Where the folder has no locks, as one that cannot be written, every process packs.
    Each part of a checkpoint and each rank has its own file, so ranks pack at the same time.

    Raises ConfigError: the folder cannot be created.
    """
    if folder is None:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{_OPTION}: expected a folder or a place for one: {error}", param=_OPTION) from error
    path = folder / name
    file = _open(path, key, logging.DEBUG)
    if file is not None:
        found = PackedMatrices(file)
        yield found
        if found.has_new:
            with _turn(path) as is_alone:
                _save(path, key, found, checkpoint, is_alone)
        return
    with _turn(path) as is_alone:
        found = PackedMatrices(_open(path, key, logging.WARNING))
        yield found
        if found.has_new:
            _save(path, key, found, checkpoint, is_alone)


def file_name(checkpoint: WeightSource, scheme: QuantScheme, part: str, shard: Shard = WHOLE_MODEL) -> str:
    """Return the name of a checkpoint's file.

    It stays when the checkpoint or the library changes, so that a new file replaces the old one.
    """
    place = checkpoint.path.resolve()
    digest = hashlib.blake2b(f"{place}\0{asdict(scheme)}".encode(), digest_size=6).hexdigest()
    rank = "" if shard == WHOLE_MODEL else f"-rank{shard.rank}of{shard.size}"
    return f"{place.name}-{part}-{scheme.linear}{rank}-{digest}.packed"


def cache_key(checkpoint: WeightSource, scheme: QuantScheme, part: str, shard: Shard = WHOLE_MODEL) -> Key:
    """Return everything that decides the packed bytes. The instruction set does not: every level packs the same."""
    return {
        "checkpoint": checkpoint.identity(),
        "part": part,
        "scheme": asdict(scheme),
        "scheme_version": SCHEME_VERSION,
        "shard": asdict(shard),
        "slice_rules": RULES_VERSION,
        "layout_version": packed_layout_version(),
        "library_version": fastdeploy_sd.__version__,
    }


def _open(path: Path, key: Key, level: int) -> PackedFile | None:
    try:
        return PackedFile(path, key)
    except FileNotFoundError:
        return None
    except PackedFileError as error:
        _log.log(level, "%s: %s: not used, packing from the checkpoint: %s", _OPTION, path, error)
        return None


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Wait for the process that packs the same weights; yield False, at once, where the file system has no locks."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(path.with_suffix(".lock"), "a", encoding="utf-8", opener=_open_at_once))
            _wait_for(lock)
        except OSError as error:
            _log.info("%s: %s: going on without a lock: %s", _OPTION, path, error)
            is_alone = False
        else:
            is_alone = True
        yield is_alone


def _open_at_once(path: str, flags: int) -> int:
    """Open a lock's file; a FIFO fails at once instead of waiting for its other end."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _wait_for(lock: IO[str]) -> None:
    """Lock a file, with a line in the log if that takes waiting; raises OSError where there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("%s: waiting for the process that packs the same weights: %s", _OPTION, lock.name)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _save(path: Path, key: Key, found: PackedMatrices, checkpoint: WeightSource, is_alone: bool) -> None:
    """Write the file, if that is possible. `is_alone`: no other process writes it meanwhile."""
    if not checkpoint.is_unchanged():
        _log.warning("%s: %s: not written: the checkpoint changed while it was read", _OPTION, path)
        return
    try:
        if is_alone:
            remove_unfinished(path)
        write_packed_file(path, key, found, checkpoint.mode())
        num_bytes = path.stat().st_size
    except OSError as error:
        _log.warning("%s: %s: not written, the next start packs again: %s", _OPTION, path, error)
        return
    _log.info("%s: wrote %s, %.2f GB", _OPTION, path, num_bytes / 1e9)
