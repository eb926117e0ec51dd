"""Slots in memory and in a file: what comes back, what is accepted, who may use it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.kv.swap_file import DamagedSlotError, SwapFile, slot_stride

BLOCK_SIZE = 16
BLOCK_BYTES = 5000
KEY = {"model": "a", "formats": ["x", 1]}
HEADER_BYTES = 4096


def content(token: int) -> CachedBlock:
    tokens, parent = np.full(BLOCK_SIZE, token, np.int32).tobytes(), PrefixCache.root("")
    return CachedBlock(PrefixCache.chain(parent, tokens), parent, tokens)


def data(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES).astype(np.uint8)


@contextmanager
def opened(path: Path | None, key: object = KEY, num_slots: int = 4) -> Iterator[SwapFile]:
    file = SwapFile(path, {"key": key}, num_slots, BLOCK_BYTES, BLOCK_SIZE)
    try:
        yield file
    finally:
        file.close()


def read(file: SwapFile, slot: int, token: int) -> list[int]:
    found = np.empty(BLOCK_BYTES, np.uint8)
    file.read(slot, content(token), found)
    return list(found)


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "kv" / "a.kvswap"


def test_a_slot_gives_back_what_was_written_last(path: Path | None) -> None:
    with opened(path) as file:
        assert file.kept() == []
        file.write(3, content(1), data(1))
        file.write(0, content(2), data(2))
        assert read(file, 3, 1) == list(data(1))
        file.write(3, content(3), data(3))
        assert read(file, 3, 3) == list(data(3))
        assert read(file, 0, 2) == list(data(2))


def test_another_content_is_not_read(path: Path | None) -> None:
    with opened(path) as file:
        file.write(0, content(1), data(1))
        for slot, token in ((0, 2), (1, 1), (3, 1)):
            with pytest.raises(DamagedSlotError, match=f"swap slot {slot}: expected a record of the block"):
                read(file, slot, token)
        file.erase(0)
        with pytest.raises(DamagedSlotError):
            read(file, 0, 1)


def test_the_next_process_finds_what_this_one_wrote(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as file:
        for slot, token in ((2, 1), (0, 2), (1, 3), (3, 4)):
            file.write(slot, content(token), data(token))
        file.write(2, content(5), data(5))
        file.erase(1)
    with opened(tmp_path / "kv") as file:
        assert file.kept() == [(0, content(2)), (3, content(4)), (2, content(5))]
        assert [read(file, slot, token) for slot, token in ((0, 2), (3, 4), (2, 5))] == [
            list(data(token)) for token in (2, 4, 5)
        ]
        file.write(1, content(6), data(6))
    with opened(tmp_path / "kv", num_slots=2) as file:
        assert file.kept() == [(0, content(2)), (1, content(6))]
    size = HEADER_BYTES + 2 * slot_stride(BLOCK_BYTES, BLOCK_SIZE)
    assert (tmp_path / "kv").stat().st_size <= size  # what is asked for now, not what it was
    with opened(tmp_path / "kv", num_slots=9) as file:
        assert file.kept() == [(0, content(2)), (1, content(6))]


def test_what_another_key_wrote_is_never_found(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as file:
        file.write(0, content(1), data(1))
    with opened(tmp_path / "kv", key={"model": "b"}) as file:
        assert file.kept() == []
        with pytest.raises(DamagedSlotError):
            read(file, 0, 1)
    with opened(tmp_path / "kv") as file:
        assert file.kept() == []


@pytest.mark.parametrize("position", [0, 12, 20, 40, 52])
def test_a_damaged_header_begins_anew_or_is_refused(tmp_path: Path, position: int) -> None:
    with opened(tmp_path / "kv") as file:
        file.write(0, content(1), data(1))
    _flip(tmp_path / "kv", position)
    if position < 8:
        with pytest.raises(ConfigError, match="expected a file of KV slots, got another kind"), opened(tmp_path / "kv"):
            pass
        return
    with opened(tmp_path / "kv") as file:
        assert file.kept() == []


def test_no_flipped_bit_of_a_slot_is_believed(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as file:
        file.write(0, content(1), data(1))
    record_bytes = 16 + 16 + 8 + 8 + 4 * BLOCK_SIZE + 8
    for position in [*range(record_bytes), record_bytes, record_bytes + 1234, record_bytes + BLOCK_BYTES - 1]:
        _flip(tmp_path / "kv", HEADER_BYTES + position)
        with opened(tmp_path / "kv") as file:
            assert (file.kept() == []) == (position < record_bytes)
            with pytest.raises(DamagedSlotError):
                read(file, 0, 1)
        _flip(tmp_path / "kv", HEADER_BYTES + position)
    with opened(tmp_path / "kv") as file:
        assert read(file, 0, 1) == list(data(1))


def test_a_file_that_was_cut_short_ends_where_it_ends(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as file:
        file.write(0, content(1), data(1))
        file.write(1, content(2), data(2))
    os.truncate(tmp_path / "kv", HEADER_BYTES + slot_stride(BLOCK_BYTES, BLOCK_SIZE) + 200)
    with opened(tmp_path / "kv") as file:
        assert read(file, 0, 1) == list(data(1))
        with pytest.raises(DamagedSlotError):
            read(file, 1, 2)


def test_one_server_at_a_time_and_no_other_user(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"):
        assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match=r"swap_folder: .*expected a file that no other server uses"):
            SwapFile(tmp_path / "kv", {}, 1, BLOCK_BYTES, BLOCK_SIZE)
    with opened(tmp_path / "kv"):
        pass


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "text"])
def test_anything_else_of_that_name_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kv"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            (tmp_path / "other").write_bytes(b"")
            path.symlink_to(tmp_path / "other")
        case _:
            path.write_text("my diary")
    with pytest.raises(ConfigError, match=r"swap_folder: .*expected"):
        SwapFile(path, {}, 1, BLOCK_BYTES, BLOCK_SIZE)
    assert kind != "text" or path.read_text() == "my diary"


def test_more_than_the_disk_has_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected room for .* bytes on its disk"):
        SwapFile(tmp_path / "kv", {}, 1 << 40, BLOCK_BYTES, BLOCK_SIZE)


def test_a_closed_file_is_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (None, None):
        with opened(path) as file:
            file.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where what an earlier test left is collected meanwhile


def _flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))
