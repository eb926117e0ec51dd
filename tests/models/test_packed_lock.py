"""The lock of a file of packed weights: one process packs, the others wait, and a folder without locks still serves."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import pathlib
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.weights.packed_cache import packed_matrices
from tests.models.packed_weights import SCHEME, Loaded, load, only_file, packed_parts

pytestmark = pytest.mark.slow


def replace_under_lock(source: str, target: pathlib.Path) -> None:
    """Fail where the lock is free while a file gets its name."""
    with open(target.with_suffix(".lock"), "a", encoding="utf-8") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(source, target)


def test_every_write_holds_the_lock(folder: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", replace_under_lock)
    for name in ("a", "b"):
        with packed_matrices(folder, Checkpoint(model), SCHEME, "draft") as store:
            assert store is not None
            store.add(name, np.zeros(70, np.uint8))
    assert only_file(folder).stat().st_size > 0


def test_what_a_killed_process_left_is_removed(folder: pathlib.Path, model: pathlib.Path) -> None:
    load(folder, model)
    path = only_file(folder)
    path.unlink()
    left, another = folder / f".{path.name}.abcd1234", folder / ".other.packed.abcd1234"
    left.touch()
    another.touch()
    load(folder, model)
    assert path.exists()
    assert not left.exists()
    assert another.exists(), "another process may be writing it"


def test_a_folder_without_a_place_for_the_lock_is_still_read(folder: pathlib.Path, model: pathlib.Path) -> None:
    """As a folder on a read-only file system: root may write everywhere, so the lock's name is taken by a folder."""
    want, _ = load(folder, model)
    lock = only_file(folder).with_suffix(".lock")
    lock.unlink()
    lock.mkdir()
    assert load(folder, model) == (want, False)
    only_file(folder).unlink()
    assert load(folder, model) == (want, True)


def test_a_fifo_in_the_place_of_the_file_or_its_lock_is_not_waited_for(
    folder: pathlib.Path, model: pathlib.Path
) -> None:
    want, _ = load(folder, model)
    path = only_file(folder)
    for name in (path, path.with_suffix(".lock")):
        name.unlink()
        os.mkfifo(name)
    assert load(folder, model) == (want, True)
    assert path.is_file(), "written in its place"


def flock_failing(code: int, failing: int) -> Callable[[object, int], None]:
    """Return a flock that fails with an error number where all flags of `failing` are given."""

    def flock(file: object, operation: int) -> None:
        if operation & failing == failing:
            raise OSError(code, os.strerror(code))

    return flock


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_used_without(
    folder: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_failing(code, fcntl.LOCK_EX))
    want, _ = load(None, model)
    assert load(folder, model) == (want, True)
    path = only_file(folder)
    path.unlink()
    written_by_another = folder / f".{path.name}.abcd1234"
    written_by_another.touch()
    assert load(folder, model) == (want, True)
    assert load(folder, model) == (want, False)
    assert written_by_another.exists()


def test_who_waits_says_so(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(fcntl, "flock", flock_failing(errno.EWOULDBLOCK, fcntl.LOCK_NB))
    assert load(folder, model)[1]
    assert "waiting for the process that packs the same weights" in caplog.text


def load_in_a_process(folder: str, model: str, started: Event, results: SimpleQueue[Loaded]) -> None:
    started.set()
    results.put(load(pathlib.Path(folder), pathlib.Path(model)))


def test_a_process_waits_for_the_one_that_packs(folder: pathlib.Path, model: pathlib.Path) -> None:
    checkpoint, context = Checkpoint(model), multiprocessing.get_context("spawn")
    started, results = context.Event(), context.SimpleQueue()
    arguments = (str(folder), str(model), started, results)
    processes = [context.Process(target=load_in_a_process, args=arguments, daemon=True) for _ in range(2)]
    with packed_matrices(folder, checkpoint, SCHEME, "target") as store:
        for process in processes:
            process.start()
        started.wait()
        processes[0].join(1.0)  # long enough to pack, if it did not wait
        assert results.empty()
        want = packed_parts(checkpoint, SCHEME, store)
    assert [results.get() for _ in processes] == [(want, False)] * 2
    for process in processes:
        process.join()
